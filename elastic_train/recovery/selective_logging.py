"""Selective logging: which stage boundaries a plan logs, under a budget of bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from elastic_train.config import Checkpoints
from elastic_train.planner.model_shape import ModelShape
from elastic_train.planner.plan import Infeasible
from elastic_train.planner.question import Planned, Planner, Question
from elastic_train.recovery.boundary_groups import exact
from elastic_train.recovery.logging_forecast import boundaries

STEPS_BETWEEN = 50
"""Steps between checkpoints that are assumed where the run itself chooses them."""


def steps_between(checkpoints: Checkpoints) -> int:
    return checkpoints.every if isinstance(checkpoints.every, int) else STEPS_BETWEEN


@dataclass(frozen=True, slots=True, kw_only=True)
class Selective:
    """A planner that adds to another one's plans the groups of stages that log nothing between them.

    The groups of least mean recovery time are taken whose logs are within `budget` bytes in `interval` steps.
    """

    planner: Planner
    shape: ModelShape
    micro_batches: int
    interval: int
    bytes_s: float
    budget: int

    def __call__(self, question: Question, /) -> Planned | Infeasible:
        planned = self.planner(question)
        if isinstance(planned, Infeasible) or planned.plan.mesh.pp == 1 or planned.plan.virtual > 1:
            return planned
        plan = planned.plan
        along = boundaries(plan.stages, self.shape, self.micro_batches, self.interval, self.bytes_s)
        groups = exact(along, self.budget).groups
        alone = all(stop - start == 1 for start, stop in groups)
        return replace(planned, plan=replace(plan, groups=() if alone else groups))
