"""Shards: one rank's part of the training state under one plan, and its step."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from elastic_train.geometry.fused import Run
from elastic_train.planner.plan import Plan
from elastic_train.recovery.evidence import LocalState, Vote
from elastic_train.train.boundary.boundary_log import BoundaryLog
from elastic_train.train.boundary.logged_edges import Edges, SubstitutedRanks
from elastic_train.train.collectives.mesh_position import MeshPosition
from elastic_train.train.model import module_state
from elastic_train.train.model.build import Blueprint
from elastic_train.train.model.loss_scale import Scale
from elastic_train.train.model.lr_schedule import Schedule
from elastic_train.train.model.moving_state import Moving
from elastic_train.train.model.optimizer import Groups
from elastic_train.train.model.registered_state import Registered
from elastic_train.train.parallel.tensor_parallel import Regions
from elastic_train.train.state.kept_gradients import KeptGradients
from elastic_train.train.undo.partial_update import Progressive


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeModel:
    """The whole model by names, the same on every rank, also of what is on other stages alone.

    `shapes` are the whole shapes of parameters and buffers, `groups` the names in the optimizer's groups,
    `trainable` the parameters that are trained. Rows of `fused` tensors are in the order of the tp ranks.
    """

    shapes: Mapping[str, tuple[int, ...]]
    groups: Groups
    trainable: tuple[str, ...]
    aliases: Mapping[str, str]  # names of tied tensors -> the name that they are stored under
    fused: Mapping[str, tuple[Run, ...]]
    nbytes: int  # of parameters and buffers


@dataclass(slots=True, kw_only=True, eq=False)
class PendingStep:
    """What was made of the step after the shards' own and is not applied, or applied in part.

    `reached` is that step while its whole reduced gradient is kept in the parameters' `grad`; `buffers` get
    their values with it; `scaled` gradients are what the update takes, as a task edited them; an update
    inside the step `overflowed` where it was skipped. `progressive` is there while what a step did to single
    parameters is known and can be reversed: until the next begins.
    """

    reached: int | None = None
    buffers: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    scaled: bool = False
    overflowed: bool = False
    progressive: Progressive | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class Shards:
    """The live tensors of one rank in one generation. Mutable: the training thread alone changes it.

    Parameters and buffers are those of this rank's stage. `step` is None while a change is under way: such
    shards are torn and are no evidence. Tensors in `absent` are not at `step`, those in `undone` are only up
    to the rounding of an undo. `by_module` says whether the run's initial values are given to each module
    alone or taken from the whole model; None where that is to be chosen. `computed` are micro-batches of the
    generation's first step that ranks have the gradients of, by rank.
    """

    generation: int
    rank: int
    plan: Plan
    blueprint: Blueprint | None  # None once it ran: modules may hold gathered tensors
    whole: WholeModel
    place: MeshPosition
    regions: Regions | None
    parameters: dict[str, nn.Parameter]
    buffers: dict[str, torch.Tensor]
    optimizer: torch.optim.Optimizer
    schedule: Schedule | None
    device: torch.device
    moving: Moving = field(default_factory=Moving)  # what the optimizer changes beside its state
    gradient_memory: list[torch.Tensor] = field(default_factory=list[torch.Tensor])  # of sums over ranks
    spare_memory: list[torch.Tensor] = field(default_factory=list[torch.Tensor])  # that of the shards before
    built: module_state.State = field(default_factory=dict[str, dict[str, Any]])  # modules, as they were
    modules: module_state.State = field(default_factory=dict[str, dict[str, Any]])  # at the last boundary
    by_module: bool | None = None
    late: frozenset[int] = frozenset()  # ranks that are filled during this generation's first step
    proved: bool = True  # what came from others was compared with theirs; else it is no evidence
    computed: Mapping[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])
    kept: KeptGradients | None = None  # of the step after `step`, whose group broke
    step: int | None = None
    applied: Vote | None = None
    pending: PendingStep = field(default_factory=PendingStep)
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])  # finite ones of the last step
    evaluated: int = 0  # the last step after which an evaluation was completed
    watched: Mapping[str, Any] = field(default_factory=dict[str, Any])  # what patience knows of evaluations
    scale: Scale | None = None  # of the loss; None: it is not scaled
    decay: float | None = None  # of the average of parameters; None: there is none
    registered: Registered | None = None  # of a user's loop: its tensors are among the buffers
    log: BoundaryLog | None = None  # of what this rank sends to other stages
    substituted: SubstitutedRanks | None = None  # of lost ranks, whose steps these shards run again
    absent: frozenset[str] = frozenset()
    undone: frozenset[str] = frozenset()
    lock: threading.Lock = field(default_factory=threading.Lock)  # a reader looks at tensors that stay
    made: torch.Event | None = None  # on a device, behind what made the tensors what they are now

    @property
    def model(self) -> nn.Module:
        assert self.blueprint is not None
        return self.blueprint.model

    @property
    def whole_here(self) -> bool:
        """Whether this rank, like every other, holds all of the model."""
        return self.plan.mesh.dp_replicate == self.plan.world_size

    @property
    def elsewhere(self) -> frozenset[str]:
        """Tensors of the model that are on other stages alone."""
        return frozenset(self.whole.shapes) - self.parameters.keys() - self.buffers.keys()

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
        """The part of this rank under the plan that cut it; None where it is torn, or not compared yet."""
        if self.step is None or not self.proved:
            return None
        whole = LocalState(
            generation=self.generation,
            rank=self.rank,
            step=self.step,
            reached=self.pending.reached,
            applied=self.applied,
        )
        made = self.pending.progressive
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
        self.whole = replace(self.whole, trainable=tuple(names))

    def look_at_modules(self) -> None:
        """Keep what modules hold beside their tensors, as it is now."""
        if self.blueprint is not None:
            loops = self.registered is not None
            self.modules = module_state.capture(self.model, self.built, attributes=loops)

    def commit(self, vote: Vote) -> None:
        """Everything is at the vote's step: the shards are whole again."""
        self.mark_made()
        with self.lock:
            self.pending.buffers, self.pending.reached = {}, None
            self.applied, self.step = vote, vote.step

    def mark_made(self) -> None:
        """The tensors are what the operations make of them that the caller enqueued so far."""
        if self.device.type != "cpu":
            self.made = torch.accelerator.current_stream(self.device).record_event()

    def drop_gradients(self) -> None:
        self.pending = PendingStep()
        for parameter in self.parameters.values():
            parameter.grad = None

    def settle(self) -> None:
        """No step of this generation runs any more: forget the modules and a gradient that is not whole."""
        whole = self.step is not None and self.pending.reached == self.step + 1
        made = self.pending.progressive
        if not whole and (made is None or not made.begun):
            self.drop_gradients()
        self.blueprint = None
