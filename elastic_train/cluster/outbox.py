"""A worker's event queue to the controller: in order, at least once, never blocking training.

Words wait here while the controller is restarting. The controller's answer is also the sign that it lives: a
worker that hears nothing for the grace time ends its own process, so that no run leaves zombies. Time in
which this process could not listen, because it was stopped or code held the GIL, is no silence of the
controller's.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayError

log = logging.getLogger(__name__)

ORPHAN_LEASES = 6
"""Lease times that a process outlives its controller, whose restart takes a while on a busy machine."""

GATHER_S = 0.05
"""How long words that can wait do so after the last delivery: each costs both processes, and a driver that
hears of it, about as much as a step of a few milliseconds."""


class Outbox:
    """Sends events and heartbeats from a thread of its own.

    `send(events, beat) -> bool` is the controller's method: False means that this worker is not (any more)
    one of the run's and has to end. `expired` is called once, from this thread, when the controller has been
    silent for `grace_s` or has disowned the worker.
    """

    def __init__(
        self,
        send: Callable[[list[Any], Any], ray.ObjectRef],
        beat: Callable[[], Any],
        *,
        heartbeat_s: float,
        grace_s: float,
        expired: Callable[[str], None],
    ) -> None:
        self._send, self._beat, self._expired = send, beat, expired
        self._heartbeat_s, self._grace_s = heartbeat_s, grace_s
        self._answer_s, self._rest_s = max(2.0, heartbeat_s * 2), min(0.5, heartbeat_s)
        self._words: deque[Any] = deque()
        self._wake, self._hurry = threading.Event(), threading.Event()
        self._sent_at = 0.0
        self._pause = threading.Event()
        self._silent_s = 0.0
        self._thread = threading.Thread(target=self._run, name="outbox", daemon=True)
        self._thread.start()

    def post(self, *events: Any, can_wait: bool = False) -> None:
        """Events that are posted together are delivered together. Those that `can_wait` go with the next that
        can't, or a moment after the last delivery.
        """
        self._words.extend(events)
        if not can_wait:
            self._hurry.set()
        self._wake.set()

    def flush(self, within_s: float) -> None:
        """Wait until the controller has heard everything, but no longer than that."""
        give_up = time.monotonic() + within_s
        self._hurry.set()
        while self._words and time.monotonic() < give_up:
            time.sleep(0.01)

    def _run(self) -> None:
        while True:
            self._wake.wait(self._heartbeat_s)
            self._hurry.wait(max(0.0, self._sent_at + GATHER_S - time.monotonic()))
            self._wake.clear()
            self._hurry.clear()
            batch, began = list(self._words), time.monotonic()
            self._sent_at = began
            known = self._deliver(batch)
            if known is None:  # not delivered: keep the words, try again, give up after the grace time
                listened = min(time.monotonic() - began, self._answer_s + 1.0)
                self._silent_s += listened + self._rest_s
                if self._silent_s > self._grace_s:
                    self._expired(f"no word from the controller for {self._silent_s:.0f} s")
                    return
                self._pause.wait(self._rest_s)
                self._wake.set()
                continue
            self._silent_s = 0.0
            for _ in batch:
                self._words.popleft()
            if self._words:  # that came meanwhile
                self._wake.set()
            if not known:
                self._expired("the controller does not know this worker")
                return

    def _deliver(self, batch: list[Any]) -> bool | None:
        try:
            return ray.get(self._send(batch, self._beat()), timeout=self._answer_s)
        except RayError as problem:
            log.info("controller not reached: %s", type(problem).__name__)
        except Exception as error:
            log.warning("words could not be sent", exc_info=error)
        return None
