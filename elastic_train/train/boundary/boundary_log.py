"""Sender-side boundary log: sent tensors are copied off the critical path to memory, then to local disk.

`keep` takes a reference and returns; a thread copies. Nobody ever waits for the log: where it cannot keep up
or has no room, the step has a gap, and a gap means that this step cannot be replayed.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from elastic_train.recovery.evidence import Vote
from elastic_train.recovery.replayable_steps import Span
from elastic_train.train.boundary.crossing import Crossing
from elastic_train.train.boundary.log_buffers import KeptTensor, LogBuffers, copied


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """How much a log may hold. `waiting` bytes may be sent and not copied yet."""

    memory: int
    waiting: int
    disk: int = 0
    directory: Path | None = None  # a local one


FLUSH_S = 2.0
"""How long a final report waits for copies; steps that aren't copied by then count as not kept."""

Chosen = Callable[[int], bool]
"""Whether a step is meant."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Waiting:
    crossing: Crossing
    tensor: torch.Tensor
    version: int
    nbytes: int


class BoundaryLog:
    """The log of one rank. `keep`, `close_step` and `seal` belong to the training thread, the rest to any."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._buffers = LogBuffers(memory=room.memory, disk=room.disk, directory=room.directory)
        self._entries: dict[int, dict[Crossing, KeptTensor]] = {}  # by step
        self._votes: dict[int, Vote] = {}
        self._whole = 0  # the newest step of which everything was given to `keep`
        self._gaps: set[int] = set()
        self._queue: deque[_Waiting] = deque()
        self._queued = 0
        self._forgotten = 0
        self._changed = threading.Condition()  # guards what a step is known to be, never held for long
        self._lock = threading.Lock()  # guards the entries, also while one goes to disk
        self._closed = False
        self._thread = threading.Thread(target=self._copy, name="boundary-log", daemon=True)
        self._thread.start()

    # -- the training thread

    def keep(self, crossing: Crossing, tensor: torch.Tensor) -> None:
        """Keep a tensor that is being sent. It must not be changed until it was copied: checked."""
        held = tensor.detach()
        size = held.numel() * held.element_size()
        with self._changed:
            if self._queued + size > self._room.waiting:
                self._gaps.add(crossing.step)
                return
            self._queued += size
            waiting = _Waiting(crossing=crossing, tensor=held, version=held._version, nbytes=size)
            self._queue.append(waiting)
            self._changed.notify_all()

    def close_step(self, step: int) -> None:
        """All that this rank sends in a step was given to `keep`; what the vote decides is not known yet."""
        with self._changed:
            self._whole = max(self._whole, step)

    def seal(self, vote: Vote) -> None:
        """The outcome of a step, all of which was given to `keep`."""
        with self._changed:
            self._whole = max(self._whole, vote.step)
            self._votes[vote.step] = vote

    # -- any thread

    def drop(self, first: int) -> None:
        """Steps from `first` on were broken off or left behind: forget what was sent in them."""
        with self._changed:
            self._changed.wait_for(lambda: all(w.crossing.step < first for w in self._queue))
        self._remove(lambda at: at >= first)
        with self._changed:
            self._gaps = {step for step in self._gaps if step < first}
            self._votes = {step: vote for step, vote in self._votes.items() if step < first}
            self._whole = min(self._whole, first - 1)

    def forget(self, through: int) -> None:
        """The receivers' checkpoint of step `through` is durable: nothing up to it is replayed any more."""
        with self._changed:
            self._forgotten = max(self._forgotten, through)
            self._gaps = {step for step in self._gaps if step > through}
            self._votes = {step: vote for step, vote in self._votes.items() if step > through}
        self._remove(lambda at: at <= through)

    def span(self) -> Span | None:
        """The newest run of whole steps, each sealed, copied and without a gap."""
        with self._changed:
            return self._span()

    def reach(self) -> tuple[int, int, bool] | None:
        """`span`, and whether the step after it is whole too but for its outcome, which others may know.

        Where that is all there is, the span is empty: its last step is the one before its first.
        """
        with self._changed:
            span, step = self._span(), self._whole
            is_open = step not in self._votes and step not in self._lacking() and step > self._forgotten
        if span is not None:
            return *span, is_open and step == span[1] + 1
        return (step, step - 1, True) if is_open else None

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all that was given is copied; whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue, timeout)

    def read(self, crossing: Crossing) -> torch.Tensor:
        with self._lock:
            return self._buffers.read(self._entries[crossing.step][crossing])

    def vote(self, step: int) -> Vote:
        with self._changed:
            return self._votes[step]

    def outcome(self, step: int) -> Vote | None:
        """That of a step's vote, if it is known."""
        with self._changed:
            return self._votes.get(step)

    def crossings(self, source: int, target: int, step: int | None = None) -> tuple[Crossing, ...]:
        """What is kept of the way from one stage to another, in one step or in all."""
        with self._lock:
            steps = self._entries if step is None else (step,)
            found = (c for at in steps for c in self._entries.get(at, ()))
            return tuple(sorted(c for c in found if (c.source, c.target) == (source, target)))

    @property
    def nbytes(self) -> int:
        """Bytes held, in memory and on disk."""
        with self._lock:
            return self._buffers.memory_used + self._buffers.disk_used

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        self._buffers.close()

    # -- the copying thread

    def _copy(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._queue) or self._closed)
                if self._closed:
                    return
                job = self._queue[0]
            kept = self._kept(job)
            with self._changed:
                if not kept and job.crossing.step > self._forgotten:
                    self._gaps.add(job.crossing.step)
                self._queue.popleft()
                self._queued -= job.nbytes
                self._changed.notify_all()

    def _kept(self, job: _Waiting) -> bool:
        """Copy; whether there is room and nobody changed the tensor meanwhile."""
        with self._lock:
            data = self._buffers.buffer(job.nbytes)
        if data is None:
            return False
        entry = copied(job.tensor, data)
        torn = job.tensor._version != job.version
        with self._lock:
            if torn or job.crossing.step <= self._forgotten or not self._admitted(entry):
                return False
            self._entries.setdefault(job.crossing.step, {})[job.crossing] = entry
            return True

    def _remove(self, chosen: Chosen) -> None:
        with self._lock:
            for step in [s for s in self._entries if chosen(s)]:
                self._give_back(step)

    # -- with `_lock` held

    def _admitted(self, entry: KeptTensor) -> bool:
        """Make room: the oldest entries go to disk, and where that is full the oldest step goes."""
        while not self._buffers.fits(entry):
            oldest = self._oldest_inside()
            if oldest is None:
                return False
            if not self._buffers.spill(oldest):
                step = min(self._entries)
                with self._changed:
                    self._gaps.add(step)
                self._give_back(step)
        self._buffers.take(entry)
        return True

    def _oldest_inside(self) -> KeptTensor | None:
        """The oldest entry that is in memory. The ones that went out did so in order."""
        for step in sorted(self._entries):
            entries = self._entries[step]
            inside = min((c for c, e in entries.items() if e.data is not None), default=None)
            if inside is not None:
                return entries[inside]
        return None

    def _give_back(self, step: int) -> None:
        for entry in self._entries.pop(step).values():
            self._buffers.give_back(entry)

    # -- with `_changed` held

    def _span(self) -> Span | None:
        lacking = self._lacking()
        whole = {step for step in self._votes if step not in lacking}
        if not whole:
            return None
        first = last = max(whole)
        while first - 1 in whole:
            first -= 1
        return first, last

    def _lacking(self) -> set[int]:
        return self._gaps | {w.crossing.step for w in self._queue}
