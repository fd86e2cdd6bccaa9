"""How often snapshots go to peer memory: steps and seconds since the last one, against what one costs."""

from __future__ import annotations

import time
from typing import Literal

from elastic_train.control.schedule import peer_is_due


class SnapshotCadence:
    """`every` so many steps, or "auto": by `cost_s`, what the last snapshot took from training."""

    def __init__(self, every: int | Literal["auto"]) -> None:
        self._every: int | Literal["auto"] = every
        self._steps, self._at = 0, time.monotonic()
        self.cost_s = 0.0

    def count_step(self) -> None:
        self._steps += 1

    def begun(self) -> None:
        """A snapshot begins."""
        self._steps, self._at = 0, time.monotonic()

    @property
    def due(self) -> bool:
        seconds = time.monotonic() - self._at
        return peer_is_due(self._every, steps=self._steps, seconds=seconds, cost_s=self.cost_s)

    @property
    def binding(self) -> bool:
        """Whether one is due by a number of steps, so that none may be left out."""
        return self._every != "auto" and self._steps >= self._every
