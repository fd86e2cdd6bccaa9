"""Straggler detection: ranks that are slower than their peers for several steps, and by what factor.

Compared is each rank's own time in forward and backward of a micro-batch, without what it waits for others,
among the ranks of its stage: stages are not alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from elastic_train.config import SLOWEST

STEPS = 5
"""Consecutive steps for which a rank has to be slow, or keep up again, so that one stall is no alarm."""


@dataclass(slots=True, kw_only=True)
class Pace:
    """Own seconds of the last steps, by rank. Mutable: whoever watches a group feeds it.

    `stages`: each rank's, where there is more than one. `slow` are the ranks that are known to be slow, from
    before as well.
    """

    stages: Mapping[int, int] = field(default_factory=dict[int, int])
    slow: set[int] = field(default_factory=set[int])
    steps: dict[int, int] = field(default_factory=dict[int, int])  # the last step heard of
    runs: dict[int, int] = field(default_factory=dict[int, int])  # consecutive slow steps, or others if < 0
    seconds: dict[int, float] = field(default_factory=dict[int, float])

    def heard(self, rank: int, step: int, seconds: float) -> None:
        """A rank took so many seconds for each micro-batch of its part of a step."""
        if self.steps.get(rank) == step or seconds <= 0:
            return
        self.steps[rank], self.seconds[rank] = step, seconds
        factor, run = self.factor(rank), self.runs.get(rank, 0)
        if factor is None:
            return
        run = self.runs[rank] = max(run, 0) + 1 if factor >= SLOWEST else min(run, 0) - 1
        if run >= STEPS:
            self.slow.add(rank)
        elif run <= -STEPS:
            self.slow.discard(rank)

    def factor(self, rank: int) -> float | None:
        """How many times slower than the median of the others a rank is; None without others."""
        stage = self.stages.get(rank)
        others = [s for r, s in self.seconds.items() if r != rank and self.stages.get(r) == stage]
        return self.seconds[rank] / median(others) if others and rank in self.seconds else None

    def slowness(self, rank: int) -> float | None:
        """The factor of a rank that is slow, 0 for one that is not; None for a slow one that was not heard
        of yet.
        """
        return self.factor(rank) if rank in self.slow else 0.0
