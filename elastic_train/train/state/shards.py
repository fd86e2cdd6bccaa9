"""What one rank holds of the training state under one plan, and how far along it is."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from elastic_train.geometry.fused import Run
from elastic_train.planner.plan import Plan
from elastic_train.recovery.evidence import LocalState, Vote
from elastic_train.train.boundary.boundary_log import BoundaryLog
from elastic_train.train.boundary.logged_edges import Edges, SubstitutedRanks
from elastic_train.train.collectives.mesh_position import MeshPosition
from elastic_train.train.model import module_state
from elastic_train.train.model.build import Blueprint
from elastic_train.train.model.lr_schedule import Schedule
from elastic_train.train.model.moving_state import Moving
from elastic_train.train.model.optimizer import Groups
from elastic_train.train.model.registered_state import Registered
from elastic_train.train.parallel.tensor_parallel import Regions
from elastic_train.train.undo.partial_update import Progressive


@dataclass(slots=True, kw_only=True, eq=False)
class Shards:
    """The live tensors of one rank in one generation. Mutable: the training thread alone changes it.

    `shapes` are the whole shapes of parameters and buffers, `groups` and `trainable` the names in the
    optimizer's groups and of what is trained: of the whole model, as `aliases` too, while parameters and
    buffers are those of this rank's stage. Rows of `fused` tensors are in the order of the tp ranks. `step`
    is None while a change is under way: such shards are torn and are no evidence. `reached` is set while the
    whole reduced gradient of the next step is kept in the parameters' `grad`. `progressive` is there while
    what a step did to single parameters is known and can be reversed. Tensors in `absent` are not at `step`,
    those in `undone` are only up to the rounding of an undo. `by_module` says whether the run's initial
    values are given to each module alone or taken from the whole model; None where that is to be chosen.
    """

    generation: int
    rank: int
    plan: Plan
    blueprint: Blueprint | None  # None once it ran: modules may hold gathered tensors
    aliases: Mapping[str, str]
    mesh: DeviceMesh | None
    place: MeshPosition
    regions: Regions | None
    groups: Groups
    trainable: tuple[str, ...]
    fused: Mapping[str, tuple[Run, ...]]
    shapes: Mapping[str, tuple[int, ...]]
    parameters: dict[str, nn.Parameter]
    buffers: dict[str, torch.Tensor]
    optimizer: torch.optim.Optimizer
    schedule: Schedule | None
    device: torch.device
    moving: Moving = field(default_factory=Moving)  # what the optimizer changes beside its state
    built: module_state.State = field(default_factory=dict[str, dict[str, Any]])  # modules, as they were
    modules: module_state.State = field(default_factory=dict[str, dict[str, Any]])  # at the last boundary
    whole_bytes: int = 0  # of the model's parameters and buffers
    by_module: bool | None = None
    step: int | None = None
    reached: int | None = None
    applied: Vote | None = None
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])  # finite ones of the last step
    evaluated: int = 0  # the last step after which an evaluation was completed
    registered: Registered | None = None  # of a user's loop: its tensors are among the buffers
    log: BoundaryLog | None = None  # of what this rank sends to other stages
    substituted: SubstitutedRanks | None = None  # of lost ranks, whose steps these shards run again
    progressive: Progressive | None = None
    absent: frozenset[str] = frozenset()
    undone: frozenset[str] = frozenset()
    pending_buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    scaled: bool = False  # the gradient is what the update takes: a task edited it
    lock: threading.Lock = field(default_factory=threading.Lock)  # a reader looks at tensors that stay

    @property
    def model(self) -> nn.Module:
        assert self.blueprint is not None
        return self.blueprint.model

    @property
    def elsewhere(self) -> frozenset[str]:
        """Tensors of the model that are on other stages alone."""
        return frozenset(self.shapes) - self.parameters.keys() - self.buffers.keys()

    @property
    def edges(self) -> Edges:
        return Edges.of(self.plan, self.rank, self.substituted)

    @property
    def hidden(self) -> frozenset[str]:
        """Tensors that others hold, and hold to the bit."""
        return self.substituted.hidden if self.substituted is not None else frozenset()

    def local_states(self) -> tuple[LocalState, ...]:
        """What could be given to others, one for each rank whose part it is; none where it is torn."""
        own = self.local_state()
        if own is None or self.substituted is None:
            return () if own is None else (own,)
        return tuple(replace(own, rank=rank) for rank in self.substituted.ranks)

    def local_state(self) -> LocalState | None:
        """The part of this rank under the plan that cut it; None where it is torn."""
        if self.step is None:
            return None
        whole = LocalState(
            generation=self.generation,
            rank=self.rank,
            step=self.step,
            reached=self.reached,
            applied=self.applied,
        )
        made = self.progressive
        if made is None or not made.begun:
            return whole
        if made.finished and not made.behind:
            return replace(whole, undoable=made.undoable)
        return LocalState(
            generation=self.generation,
            rank=self.rank,
            step=made.step - 1,
            applied=made.applied,
            ahead=tuple(sorted(made.ahead)),
            kept=tuple(sorted(made.kept)),
            behind=tuple(sorted(made.behind)),
            passed=self.applied if made.finished else made.opening,
            undoable=made.undoable,
        )

    def train(self, names: Collection[str]) -> None:
        """These parameters are trained, and no others."""
        for fqn, parameter in self.parameters.items():
            parameter.requires_grad_(fqn in names)
        self.trainable = tuple(names)

    def look_at_modules(self) -> None:
        """Keep what modules hold beside their tensors, as it is now."""
        if self.blueprint is not None:
            loops = self.registered is not None
            self.modules = module_state.capture(self.model, self.built, attributes=loops)

    def drop_gradients(self) -> None:
        self.reached = self.progressive = None
        self.pending_buffers, self.scaled = {}, False
        for parameter in self.parameters.values():
            parameter.grad = None

    def settle(self) -> None:
        """No step of this generation runs any more: forget the modules and a gradient that is not whole."""
        whole = self.step is not None and self.reached == self.step + 1
        if not whole and (self.progressive is None or not self.progressive.begun):
            self.drop_gradients()
        self.blueprint = None
