"""Event hooks: post a run's events to a URL, or pipe them to a command.

Events wait in a queue and are delivered by a thread, with retries; training never waits, and what cannot be
delivered is counted and dropped.
"""

from __future__ import annotations

import json
import logging
import queue
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

from elastic_train.control.events import (
    CheckpointCommitted,
    GroupReady,
    NodesChanged,
    StepCommitted,
)
from elastic_train.observe.journal_records import Record

log = logging.getLogger(__name__)
TRIES = 3
DELIVER_S = 10.0
WAITING = 1000
END_S = 5.0  # how long the end of a run waits for its last events


class EventHook:
    """`target` is an http(s) URL or a shell command. Call `hear` with every record, `close` at the end."""

    def __init__(self, target: str, run: str, *, wait_s: float = 1.0) -> None:
        self._deliver: Callable[[bytes], None] = (
            (lambda body: _post(target, body))
            if target.startswith(("http://", "https://"))
            else (lambda body: _command(target, body))
        )
        self._run, self._wait_s = run, wait_s
        self._step = 0
        self._waiting: queue.Queue[dict[str, Any] | None] = queue.Queue(WAITING)
        self.dropped = 0
        self._thread = threading.Thread(target=self._work, name="on_event", daemon=True)
        self._thread.start()

    def hear(self, record: Record) -> None:
        """Pass on a record that somebody outside would want to know of."""
        event = record.event
        lost = max(self._step - record.formed.step, 0) if record.formed is not None else 0
        if isinstance(event, StepCommitted):
            self._step = max(self._step, event.step)
        if not record.commands and not isinstance(event, GroupReady | CheckpointCommitted | NodesChanged):
            return
        if isinstance(event, StepCommitted) and record.ended is None:
            return
        if record.formed is not None:
            self._step = record.formed.step
        self._put(
            {
                "event": _name(record),
                "run": self._run,
                "cause": record.reason,
                "step": self._step,
                "steps_lost": lost,
                "change": record.change.kind if record.change is not None else "",
                "node": _node(record),
                "plan": record.formed.plan if record.formed is not None else "",
                "phase": record.phase,
                "at": record.wall,
            }
        )

    def close(self) -> None:
        """Deliver what waits, for a few seconds."""
        self._put(None)
        self._thread.join(END_S)

    def _put(self, message: dict[str, Any] | None) -> None:
        try:
            self._waiting.put_nowait(message)
        except queue.Full:
            self.dropped += 1

    def _work(self) -> None:
        while (message := self._waiting.get()) is not None:
            self._try(message)

    def _try(self, message: Mapping[str, Any]) -> None:
        body = json.dumps(message).encode()
        pause = threading.Event()
        for number in range(TRIES):
            try:
                self._deliver(body)
                return
            except (OSError, subprocess.SubprocessError, ValueError) as error:
                log.warning("on_event: try %d of %d: %s", number + 1, TRIES, error)
                pause.wait(self._wait_s * 2**number)
        self.dropped += 1
        log.warning(
            "on_event: %s was not delivered; %d events were dropped so far", message["event"], self.dropped
        )


def _name(record: Record) -> str:
    """`ended` and `formed` for what the run did, else what happened to it, like `worker_lost`."""
    if record.ended is not None:
        return "ended"
    if record.formed is not None:
        return "formed"
    words = type(record.event).__name__
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in words).lstrip("_")


def _node(record: Record) -> str:
    """The nodes that it happened to: those that were lost, or those that are about to leave."""
    if record.change is not None and record.change.nodes:
        return ", ".join(record.change.nodes)
    if isinstance(record.event, NodesChanged):
        return ", ".join(node.name for node in record.event.nodes if node.drain_by is not None)
    return ""


def _post(url: str, body: bytes) -> None:
    request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=DELIVER_S):
        return


def _command(command: str, body: bytes) -> None:
    subprocess.run(command, shell=True, input=body, timeout=DELIVER_S, check=True, capture_output=True)
