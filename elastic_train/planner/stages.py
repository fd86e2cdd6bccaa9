"""Cut a sequence of layers into stages so that the slowest is as fast as it can be, within memory.

With s_i the time of stage i and m micro-batches, a step takes sum(s_i) + (m - 1) * max(s_i) whatever the cut
(Zheng et al., "Alpa", OSDI 2022, equation 2). The sum is given, so only the slowest stage counts.

Under 1F1B the stage at distance j from the end holds j + 1 micro-batches (Narayanan et al., "Efficient
Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC 2021, section 2.2). Cuts are
therefore searched from the end: one pass answers for every number of stages.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Allowed = Callable[[int], NDArray[np.bool_]]
"""By distance from the last stage: whether [start, stop) may be a stage, as a matrix of (start, stop)."""

EARLY = 1e-4
"""How much more the time of a stage counts for every stage after it, where cuts are equal otherwise."""


def spans(values: Floats) -> Floats:
    """Sums over [start, stop) as a matrix of size (n + 1, n + 1); infinite where there is no layer."""
    n = len(values)
    before = np.concatenate([[0.0], np.cumsum(values)])
    sums = before[None, :] - before[:, None]
    sums[np.tri(n + 1, dtype=bool)] = np.inf
    return sums


class Slowest:
    """Time of the slowest stage of the best cut by number of stages, worked out as far as it is asked for."""

    def __init__(self, seconds: Floats, allowed: Allowed | None = None) -> None:
        self._times, self._allowed = spans(seconds), allowed
        self._best = np.full(len(seconds) + 1, np.inf)
        self._best[-1] = 0.0
        self._answers: list[float] = []

    def of(self, stages: int) -> float:
        """Seconds; infinite where there is no cut into so many."""
        while len(self._answers) < stages:
            step = self._times
            if self._allowed is not None:
                step = np.where(self._allowed(len(self._answers)), step, np.inf)
            self._best = np.maximum(step, self._best[None, :]).min(axis=1)
            self._answers.append(float(self._best[0]))
        return self._answers[stages - 1]


def cut(seconds: Floats, stages: int, limit: float, allowed: Allowed | None = None) -> tuple[int, ...]:
    """Where to cut: `stages` + 1 positions from 0 to n, no stage slower than `limit`.

    Of these cuts the one with the least sum of squared times: what the slowest leaves free is spread evenly,
    and the first stages, which hold most micro-batches, are the lighter ones.
    """
    times = spans(seconds)
    costs = np.where(times <= limit * (1 + 1e-12), times**2, np.inf)
    best = np.full(len(seconds) + 1, np.inf)
    best[-1] = 0.0
    choices: list[NDArray[np.intp]] = []
    for stage in range(stages):
        step = costs * (1 + EARLY * stage)
        step = np.where(allowed(stage), step, np.inf) if allowed else step
        total = step + best[None, :]
        choices.append(total.argmin(axis=1))
        best = total.min(axis=1)
    assert np.isfinite(best[0]), "the limit was answered by Slowest"
    positions = [0]
    for choice in reversed(choices):
        positions.append(int(choice[positions[-1]]))
    return tuple(positions)
