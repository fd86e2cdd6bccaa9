"""Watch for the driver of a run: one that is silent for too long counts as gone."""

from __future__ import annotations

import threading
import time

from elastic_train.control.events import StopRequested

DRIVER_LEASES = 3  # lease times that the driver may be silent


class DriverWatch:
    def __init__(self, lease_s: float) -> None:
        self._limit_s = DRIVER_LEASES * lease_s
        self._heard = time.monotonic()

    @property
    def silent_s(self) -> float:
        return time.monotonic() - self._heard

    def heard(self) -> None:
        self._heard = time.monotonic()

    def forgive(self, seconds: float) -> None:
        """Take this much off its silence: nobody listened in that time."""
        self._heard += seconds

    def check(self) -> StopRequested | None:
        """A request to stop where the driver is gone; the next one follows after as long again."""
        silent_s = self.silent_s
        if silent_s <= self._limit_s:
            return None
        self.heard()
        return StopRequested(at=0.0, reason=f"the driver has been silent for {silent_s:.0f} s", patient=True)

    def wait_until_gone(self) -> None:
        pause = threading.Event()
        while self.silent_s < self._limit_s:
            pause.wait(1.0)
