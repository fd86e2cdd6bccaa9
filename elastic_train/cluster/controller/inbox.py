"""The controller's event queue: stamps events with its clock, and holds back those that come too early."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterable, Sequence

from elastic_train.cluster.controller.liveness_watch import at
from elastic_train.control.events import Event


class Inbox:
    """Safe from several threads. Times are seconds since it was made."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._early: list[Event] | None = []  # events of workers from before this term began
        self._lock = threading.Lock()

    def now(self) -> float:
        return time.monotonic() - self._began

    def post(self, event: Event) -> None:
        """Put an event in, as of now."""
        self._events.put(at(event, self.now()))

    def put(self, event: Event) -> None:
        """Put an event in that has its time."""
        self._events.put(event)

    def hear(self, events: Sequence[Event]) -> None:
        """Take a worker's events, or keep them until `open`: newer steps must not overtake repeated ones."""
        with self._lock:
            if self._early is not None:
                self._early += events
                return
        for event in events:
            self.post(event)

    def open(self, first: Iterable[Event]) -> None:
        """Let in `first`, then the events of workers that were kept, and from now on each as it comes."""
        with self._lock:
            for event in (*first, *(self._early or ())):
                self.post(event)
            self._early = None

    def next(self, until: float) -> Event | None:
        """The next event, or None if none comes until then."""
        try:
            return self._events.get(timeout=max(0.0, until - self.now()))
        except queue.Empty:
            return None

    def empty(self) -> bool:
        return self._events.empty()
