"""Decide when a snapshot to peer memory is due, from the time since the last one and its cost."""

from __future__ import annotations

import time
from typing import Literal

from elastic_train.control.schedule import peer_is_due
from elastic_train.control.snapshot_cost import SnapshotCost


class SnapshotCadence:
    """`every` so many steps, or "auto": by what the last snapshots took from training. `copy_s` is what the
    copying of the last one took, which is believed until steps have told more.
    """

    def __init__(self, every: int | Literal["auto"]) -> None:
        self._every: int | Literal["auto"] = every
        self._steps, self._at = 0, time.monotonic()
        self._cost, self._beside = SnapshotCost(), False
        self.copy_s = 0.0

    def restart(self) -> None:
        """Another generation: its steps take another time."""
        self._cost, self._beside = SnapshotCost(), False

    def count_step(self) -> None:
        self._steps += 1

    def begun(self) -> None:
        """A snapshot begins."""
        self._steps, self._at = 0, time.monotonic()
        self._cost, self._beside = self._cost.begun(), True

    def step_took(self, seconds: float, *, unfinished: bool, flushing: bool) -> None:
        """A step ended. `unfinished`: a snapshot is still under way. Steps while one is `flushing` to storage
        tell nothing of the others.
        """
        if not flushing:
            self._cost = self._cost.after(seconds, under_way=self._beside)
        self._beside = unfinished

    @property
    def cost_s(self) -> float:
        """What a snapshot takes from training, in seconds."""
        return self._cost.seconds(self.copy_s)

    @property
    def due(self) -> bool:
        if self._every == "auto" and self._cost.wants_quiet:
            return False
        seconds = time.monotonic() - self._at
        return peer_is_due(self._every, steps=self._steps, seconds=seconds, cost_s=self.cost_s)

    @property
    def binding(self) -> bool:
        """Whether one is due by a number of steps, so that none may be left out."""
        return self._every != "auto" and self._steps >= self._every
