"""Watch for the driver of a run: one that is silent counts as gone, if its process isn't there either.

A controller is on its driver's machine. A driver that is stopped, or starved of the machine, is slow: the run
goes on without it for as long as user code may take, which its callbacks are.
"""

from __future__ import annotations

import threading
import time

from elastic_train.cluster.driver_process import DriverProcess
from elastic_train.config import Timing
from elastic_train.control.events import StopRequested

DRIVER_LEASES = 3  # lease times that the driver may be silent


class DriverWatch:
    def __init__(self, driver: DriverProcess, timing: Timing) -> None:
        self._driver = driver
        self._limit_s = DRIVER_LEASES * timing.lease_s
        self._patience_s = max(self._limit_s, timing.user_code_s)
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
        if not self._is_gone(silent_s):
            return None
        self.heard()
        return StopRequested(at=0.0, reason=f"the driver has been silent for {silent_s:.0f} s", patient=True)

    def wait_until_gone(self) -> None:
        pause = threading.Event()
        while not self._is_gone(self.silent_s):
            pause.wait(1.0)

    def _is_gone(self, silent_s: float) -> bool:
        there = silent_s > self._limit_s and self._driver.is_there()
        return silent_s > (self._patience_s if there else self._limit_s)
