"""Measure a rank's own compute time in a step, without waiting for others.

By pass, because ranks may have unequal numbers of micro-batches. What FSDP and pipelines wait for others on
the way does not count.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class Stopwatch:
    """A Member's `faults` hook in front of another one, `then`. `waited`: the seconds of all waits so far."""

    def __init__(
        self,
        waited: Callable[[], float] = lambda: 0.0,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.then: Callable[[str, int, int], None] | None = None
        self._waited, self._clock = waited, clock
        self._began = (0, 0.0)  # step, and when its first forward began, on the clock of own time
        self._passes = 0
        self.last = (0, 0.0)  # step, and its own seconds for each micro-batch

    def __call__(self, phase: str, step: int, micro_batch: int) -> None:
        if phase == "forward":
            if self._began[0] != step:
                self._began, self._passes = (step, self._now()), 0
            self._passes += 1
        elif phase == "reduce" and self._began[0] == step:
            self.last = (step, (self._now() - self._began[1]) / self._passes)
        if self.then is not None:
            self.then(phase, step, micro_batch)

    def _now(self) -> float:
        return self._clock() - self._waited()
