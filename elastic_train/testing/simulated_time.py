"""Virtual time: a queue of calls, performed in order of their moment."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable


class Clock:
    """`draw` is the one source of chance in a simulation: the same seed gives the same history."""

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        self.draw = random.Random(seed)
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._pushed = 0

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        self._pushed += 1
        heapq.heappush(self._queue, (self.now + seconds, self._pushed, call))

    def step(self) -> bool:
        """Perform the next call; False if there is none."""
        if not self._queue:
            return False
        self.now, _, call = heapq.heappop(self._queue)
        call()
        return True
