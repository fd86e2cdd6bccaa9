"""Request to the planner and its answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from elastic_train.planner.goodput_model import Outlook
from elastic_train.planner.plan import Infeasible, Plan, WorkerSlot


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Who is there, in order of preference, and what a change would cost.

    `held` is the plan whose shards the workers hold, None where the state comes from elsewhere. Where all of
    its workers are there it may be the answer. `exceeded` are plans that turned out not to fit into the
    memory of a device: nothing that is predicted to need as much as one of them is an answer.
    """

    worker_slots: tuple[WorkerSlot, ...]
    most: int | None = None  # ranks that a plan may have
    held: Plan | None = None
    outlook: Outlook = field(default_factory=Outlook)
    exceeded: tuple[Plan, ...] = ()

    @property
    def room(self) -> int:
        """Ranks that a plan may have."""
        return len(self.worker_slots) if self.most is None else min(len(self.worker_slots), self.most)

    @property
    def stays(self) -> Plan | None:
        """The plan that is held, where all its workers are there."""
        there = {slot.worker for slot in self.worker_slots}
        return self.held if self.held is not None and there.issuperset(self.held.workers) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan and the sentence that explains it.

    `moves_live` is False where the old shards don't fit in memory beside the new ones. `moved` are the bytes
    that the worker which receives most has to receive. `step_s` is what a step takes by the rates that the
    planner goes by, where it knows the layers.
    """

    plan: Plan
    reason: str
    moves_live: bool = True
    moved: float = 0.0
    step_s: float | None = None


Planner = Callable[[Question], Planned | Infeasible]
"""The same question has the same answer, in every term."""
