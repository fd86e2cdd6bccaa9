"""Replay the steps of a lost pipeline stage from its neighbours' boundary logs.

It is the code path of the step itself. With the ranks that the stage had it is equal to the bit; idle workers
may join as replicas, each with a share of the micro-batches: their gradients are summed once a step, in the
order of the shares, and so of the ids.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic_train.config import RunSpec
from elastic_train.data.loader import Loader
from elastic_train.data.order import SampleOrder
from elastic_train.train.boundary.boundary_log import FLUSH_S
from elastic_train.train.boundary.crossing import KeptCrossings
from elastic_train.train.collectives.process_group import Group
from elastic_train.train.state.shards import Shards
from elastic_train.train.step.stepper import Mark, Stepper
from elastic_train.train.step.update import apply
from elastic_train.train.task import Task
from elastic_train.train.user_code_guard import UserCodeGuard


@dataclass(frozen=True, slots=True, kw_only=True)
class Replaying:
    """What a worker needs to replay a stage. `group` are those that replay it, and nobody else."""

    task: Task
    spec: RunSpec
    group: Group
    order: SampleOrder
    loader: Loader
    guard: UserCodeGuard
    mark: Mark

    def run(self, shards: Shards, kept: KeptCrossings, through: int) -> None:
        """Take filled shards up to a step. KeyError where `kept` lacks something: take the next rung."""
        stepper = Stepper(
            task=self.task,
            spec=self.spec,
            shards=shards,
            group=self.group,
            order=self.order,
            loader=self.loader,
            guard=self.guard,
            mark=self.mark,
            replayed=kept,
        )
        assert shards.step is not None
        for step in range(shards.step + 1, through + 1):
            stepper.gradients(step)
            vote = kept.vote(step)
            with shards.lock:
                shards.reached = step
            apply(shards, vote, self.spec)
            if shards.log is not None:
                shards.log.seal(vote)
        if shards.log is not None:
            shards.log.flush(FLUSH_S)  # others may read it at once
