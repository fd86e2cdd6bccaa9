"""Cap on write bandwidth."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class BandwidthCap:
    """At most so many bytes a second, of all threads together."""

    def __init__(
        self,
        bytes_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._bytes_s, self._clock, self._sleep = bytes_s, clock, sleep
        self._even_at = 0.0  # when as much time will have passed as what was written takes
        self._lock = threading.Lock()

    def spend(self, size: int) -> None:
        """After `size` bytes were written."""
        with self._lock:
            now = self._clock()
            self._even_at = max(self._even_at, now) + size / self._bytes_s
            left = self._even_at - now
        self._sleep(left)
