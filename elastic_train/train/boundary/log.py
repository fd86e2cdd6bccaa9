"""A sender's log: what crossed a boundary, copied off the critical path, in memory, then on local disk.

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
from elastic_train.recovery.logs import Span
from elastic_train.train.boundary.crossing import Crossing
from elastic_train.train.boundary.shelf import Entry, Shelf


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """How much a log may hold. `waiting` bytes may be sent and not copied yet."""

    memory: int
    waiting: int
    disk: int = 0
    directory: Path | None = None  # a local one


Chosen = Callable[[int], bool]
"""Whether a step is meant."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Waiting:
    crossing: Crossing
    tensor: torch.Tensor
    version: int


class BoundaryLog:
    """The log of one rank. `keep` and `seal` belong to the training thread, the rest to any."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._shelf = Shelf(memory=room.memory, disk=room.disk, directory=room.directory)
        self._entries: dict[Crossing, Entry] = {}
        self._votes: dict[int, Vote] = {}
        self._gaps: set[int] = set()
        self._queue: deque[_Waiting] = deque()
        self._queued = 0
        self._forgotten = 0
        self._changed = threading.Condition()
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
            self._queue.append(_Waiting(crossing=crossing, tensor=held, version=held._version))
            self._changed.notify_all()

    def seal(self, vote: Vote) -> None:
        """All that this rank sends in a step was given to `keep`; the step has this outcome."""
        with self._changed:
            self._votes[vote.step] = vote

    # -- any thread

    def drop(self, step: int) -> None:
        """A step that was broken off is run again: forget what was sent in it."""
        with self._changed:
            self._await_copies(step)
            self._remove(lambda at: at == step)
            self._gaps.discard(step)
            self._votes.pop(step, None)

    def forget(self, through: int) -> None:
        """The receivers' checkpoint of step `through` is durable: nothing up to it is replayed any more."""
        with self._changed:
            self._forgotten = max(self._forgotten, through)
            self._remove(lambda at: at <= through)
            self._gaps = {step for step in self._gaps if step > through}
            self._votes = {step: vote for step, vote in self._votes.items() if step > through}

    def span(self) -> Span | None:
        """The newest run of whole steps, each sealed, copied and without a gap."""
        with self._changed:
            waiting = {w.crossing.step for w in self._queue}
            whole = sorted(s for s in self._votes if s not in self._gaps and s not in waiting)
        if not whole:
            return None
        first = last = whole[-1]
        while first - 1 in whole:
            first -= 1
        return first, last

    def flush(self) -> None:
        """Wait until all that was given is copied."""
        with self._changed:
            self._changed.wait_for(lambda: not self._queue)

    def read(self, crossing: Crossing) -> torch.Tensor:
        with self._changed:
            return self._shelf.read(self._entries[crossing])

    def vote(self, step: int) -> Vote:
        with self._changed:
            return self._votes[step]

    def crossings(self, source: int, target: int) -> tuple[Crossing, ...]:
        """What is kept of the way from one stage to another."""
        with self._changed:
            return tuple(sorted(c for c in self._entries if (c.source, c.target) == (source, target)))

    @property
    def nbytes(self) -> int:
        """Bytes held, in memory and on disk."""
        with self._changed:
            return self._shelf.memory_used + self._shelf.disk_used

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        self._shelf.close()

    # -- the copying thread

    def _copy(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._queue) or self._closed)
                if self._closed:
                    return
                job = self._queue[0]
            entry = self._shelf.copied(job.tensor)  # the only long part, and nobody waits for it
            with self._changed:
                torn = job.tensor._version != job.version
                stale = job.crossing.step <= self._forgotten
                if entry is not None and not torn and not stale and self._admitted(entry):
                    self._entries[job.crossing] = entry
                elif not stale:
                    self._gaps.add(job.crossing.step)
                self._queue.popleft()
                self._queued -= job.tensor.numel() * job.tensor.element_size()
                self._changed.notify_all()

    def _admitted(self, entry: Entry) -> bool:
        """Make room: the oldest entries go to disk, and where that is full the oldest step goes."""
        while not self._shelf.fits(entry):
            inside = [c for c, e in self._entries.items() if e.data is not None]
            if not inside:
                return False
            oldest = min(inside)
            if not self._shelf.spill(self._entries[oldest]):
                step = min(c.step for c in self._entries)
                self._gaps.add(step)
                self._remove(lambda at, step=step: at == step)
        self._shelf.take(entry)
        return True

    def _await_copies(self, step: int) -> None:
        self._changed.wait_for(lambda: all(w.crossing.step != step for w in self._queue))

    def _remove(self, chosen: Chosen) -> None:
        for crossing in [c for c in self._entries if chosen(c.step)]:
            self._shelf.give_back(self._entries.pop(crossing))
