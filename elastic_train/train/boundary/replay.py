"""A lost stage runs its steps again, alone, from the log of its boundary: its neighbours do nothing.

By one worker it is the code path of the step itself, equal to the bit. Several share each step's
micro-batches, and add up their gradients one by one in the order of ids: equal to the bit too, because
that is the order in which one worker adds them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from elastic_train.config import RunSpec
from elastic_train.data.loader import Loader
from elastic_train.data.order import SampleOrder
from elastic_train.errors import ConfigError
from elastic_train.train.boundary.crossing import Kept
from elastic_train.train.group import Group
from elastic_train.train.reduce import local_gradient
from elastic_train.train.shards import Shards
from elastic_train.train.step import Mark, Stepper, Work
from elastic_train.train.task import Task
from elastic_train.train.update import apply
from elastic_train.train.user_code import Border

Gradients = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Crew:
    """The workers that share a replay; each holds the whole stage. `group` is theirs alone."""

    rank: int
    size: int
    group: dist.ProcessGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """What a worker needs to replay a stage, by itself or with a crew."""

    task: Task
    spec: RunSpec
    group: Group
    order: SampleOrder
    loader: Loader
    border: Border
    mark: Mark

    def run(self, shards: Shards, kept: Kept, through: int, crew: Crew | None = None) -> None:
        """Take the filled shards of a whole stage up to a step; KeyError where `kept` lacks something."""
        stepper = Stepper(
            task=self.task,
            spec=self.spec,
            shards=shards,
            group=self.group,
            order=self.order,
            loader=self.loader,
            border=self.border,
            mark=self.mark,
            replayed=kept,
        )
        Replayer(stepper, shards, self.spec, kept, crew).run(through)


class Replayer:
    """`stepper` was built with `kept` as what is replayed, on `shards` of the whole stage at a base step."""

    def __init__(
        self, stepper: Stepper, shards: Shards, spec: RunSpec, kept: Kept, crew: Crew | None = None
    ) -> None:
        self._stepper, self._shards, self._spec, self._kept = stepper, shards, spec, kept
        self._crew = crew if crew is not None and crew.size > 1 else None
        if self._crew is not None and any(fqn.endswith("running_mean") for fqn in shards.buffers):
            raise ConfigError(
                field="task.model",
                problem="a stage with running statistics is not replayed by several workers.",
                remedy="Replay it by one.",
            )
        self._trainable = {fqn: p for fqn, p in shards.parameters.items() if p.requires_grad}

    def run(self, through: int) -> None:
        """Up to the state of step `through`. Raises KeyError where the log has a gap: take the next rung."""
        shards = self._shards
        assert shards.step is not None
        for step in range(shards.step + 1, through + 1):
            if self._crew is None:
                self._stepper.gradients(step)
            else:
                self._shared(step, self._crew)
            vote = self._kept.vote(step)
            with shards.lock:
                shards.reached = step
            apply(shards, vote, self._spec)
            if shards.log is not None:
                shards.log.seal(vote)

    def _shared(self, step: int, crew: Crew) -> None:
        """The step's gradient from everybody's micro-batches: each runs every n-th of them."""
        self._shards.drop_gradients()
        work = self._stepper.work(step)
        total: Gradients = {}
        for start in range(0, len(work), crew.size):
            turn = work[start : start + crew.size]
            own = self._own(step, turn, crew)
            for owner in range(len(turn)):
                self._add(total, own, owner, crew)
        for fqn, gradient in total.items():
            self._trainable[fqn].grad = gradient
        self._stepper.reduce(step)

    def _own(self, step: int, turn: Sequence[Work], crew: Crew) -> Gradients:
        """The gradient of this worker's micro-batch of a turn, where it has one."""
        if crew.rank >= len(turn):
            return {}
        for _ in self._stepper.passes(step, [turn[crew.rank]]):
            pass
        found = {fqn: local_gradient(p) for fqn, p in self._trainable.items() if p.grad is not None}
        self._shards.drop_gradients()
        return found

    def _add(
        self, total: dict[str, torch.Tensor], own: dict[str, torch.Tensor], owner: int, crew: Crew
    ) -> None:
        """The owner's gradient onto the sum of those before it. What it did not reach stays as it is."""
        parameters = self._trainable
        there = torch.tensor([fqn in own for fqn in parameters], dtype=torch.uint8)
        source = dist.get_global_rank(crew.group, owner)
        dist.broadcast(there, src=source, group=crew.group)
        reached = [fqn for fqn, flag in zip(parameters, there.tolist(), strict=True) if flag]
        if not reached:
            return
        sizes = [parameters[fqn].numel() for fqn in reached]
        flat = (
            torch.cat([own[fqn].reshape(-1) for fqn in reached])
            if crew.rank == owner
            else torch.empty(sum(sizes), dtype=parameters[reached[0]].dtype)
        )
        dist.broadcast(flat, src=source, group=crew.group)
        for fqn, part in zip(reached, flat.split(sizes), strict=True):
            gradient = part.view(parameters[fqn].shape)
            total[fqn] = total[fqn].add_(gradient) if fqn in total else gradient.clone()
