"""Cache of planner answers, filled ahead of time."""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic_train.planner.plan import Infeasible
from elastic_train.planner.question import Planned, Planner, Question

KEPT = 512
"""Answers; the oldest are forgotten first."""


@dataclass(slots=True, kw_only=True)
class PlanCache:
    """Answers as the planner does, at once where the same question was asked before. Mutable.

    A question names everything that an answer depends on, so it doesn't matter who asked first, or when.
    """

    planner: Planner
    found: int = 0  # answers that were ready
    _known: dict[Question, Planned | Infeasible] = field(default_factory=dict[Question, Planned | Infeasible])

    def __call__(self, question: Question, /) -> Planned | Infeasible:
        if question in self._known:
            self.found += 1
            return self._known[question]
        return self.prepare(question)

    def prepare(self, question: Question) -> Planned | Infeasible:
        """Make the answer, if it is not known yet."""
        if question not in self._known:
            self._known[question] = self.planner(question)
            if len(self._known) > KEPT:
                del self._known[next(iter(self._known))]
        return self._known[question]
