"""How long this rank computes in a step before it waits for others: taken from a member's marks."""

from __future__ import annotations

import time
from collections.abc import Callable


class Stopwatch:
    """A Member's `faults` hook in front of another one, `then`."""

    def __init__(self) -> None:
        self.then: Callable[[str, int, int], None] | None = None
        self._began = (0, 0.0)  # step and time of its first forward
        self.last = (0, 0.0)  # step and its own seconds

    def __call__(self, phase: str, step: int, micro_batch: int) -> None:
        if phase == "forward" and self._began[0] != step:
            self._began = (step, time.monotonic())
        elif phase == "reduce" and self._began[0] == step:
            self.last = (step, time.monotonic() - self._began[1])
        if self.then is not None:
            self.then(phase, step, micro_batch)
