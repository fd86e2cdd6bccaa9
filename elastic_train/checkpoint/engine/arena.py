"""Memory for snapshots, allocated as a whole: slots of equal size.

Memory that is missing must be missed before a snapshot is under way, so every page is allocated here. Those
of a segment are mapped into a process where it first uses them: the copy of the first snapshot in each slot,
which runs beside a step, takes longer, and no generation waits for slots that nobody may need.

Each slot has a stamp: odd while it is written, even and new once it is whole. Another process that reads the
slot and finds the same even stamp before and after has read a whole snapshot.

The engines of one generation after another may use the same arena: a slot is taken until whoever has its
snapshot gives it back.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import deque
from collections.abc import Iterable
from pathlib import Path

from elastic_train.checkpoint.engine.machine_memory import free_memory
from elastic_train.errors import MemoryTooSmall

ALIGN = 4096
CACHE_LINE = 64
SPARE = 0.05
"""Share of what is free that stays free."""


def aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


def offsets(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Where fragments of these sizes begin in a slot, large ones from a page's start, and where they end."""
    found: list[int] = []
    end = 0
    for size in sizes:
        step = ALIGN if size >= ALIGN else CACHE_LINE
        found.append(-(-end // step) * step)
        end = found[-1] + size
    return found, end


def slot_bytes(sizes: Iterable[int]) -> int:
    """What one snapshot of fragments of these sizes takes."""
    return aligned(offsets(sizes)[1]) or ALIGN


class Arena:
    """`slots` regions of `size` bytes in one mapping: of this process, or of a file in shared memory."""

    def __init__(self, mapping: mmap.mmap, *, slots: int, size: int) -> None:
        assert len(mapping) >= slots * size + ALIGN
        assert slots <= ALIGN // 8
        self.slots, self.size = slots, size
        self._mapping = mapping
        self._view = memoryview(mapping)
        self._stamps = self._view[slots * size : slots * size + ALIGN].cast("Q")
        self._free = deque(range(slots))  # the one that was given back first is used first
        self._news = threading.Condition()
        self.pins: object | None = None  # what a device's driver knows of the memory, as long as it is used

    @classmethod
    def private(cls, size: int, *, slots: int) -> Arena:
        """Memory of this process; MemoryTooSmall if the machine or its control group has less."""
        size = aligned(size)
        require(slots * size, free=free_memory(), what=f"{slots} snapshots", where="memory")
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
        return cls(mmap.mmap(-1, slots * size + ALIGN, flags=flags), slots=slots, size=size)

    @classmethod
    def create(cls, path: Path, size: int, *, slots: int) -> Arena:
        """A file in shared memory, new or empty; MemoryTooSmall, and no file, if it doesn't fit."""
        size = aligned(size)
        left = os.statvfs(path.parent)
        free = min(left.f_bavail * left.f_frsize, free_memory())
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            require(slots * size, free=free, what=f"{slots} snapshots", where=str(path.parent))
            os.posix_fallocate(descriptor, 0, slots * size + ALIGN)
        except (OSError, MemoryTooSmall):
            path.unlink()
            raise
        finally:
            os.close(descriptor)
        return cls.attach(path, size, slots=slots)

    @classmethod
    def attach(cls, path: Path, size: int, *, slots: int) -> Arena:
        """The same memory in another process."""
        descriptor = os.open(path, os.O_RDWR)
        try:
            mapping = mmap.mmap(descriptor, slots * size + ALIGN, flags=mmap.MAP_SHARED)
            return cls(mapping, slots=slots, size=size)
        finally:
            os.close(descriptor)

    @property
    def free(self) -> int:
        """Slots that nobody uses."""
        with self._news:
            return len(self._free)

    def take(self, timeout: float | None = 0.0) -> int | None:
        """A slot that nobody uses, waited for `timeout` seconds, or without end; None where there is none."""
        with self._news:
            return self._free.popleft() if self._news.wait_for(lambda: bool(self._free), timeout) else None

    def give_back(self, number: int) -> None:
        with self._news:
            self._free.append(number)
            self._news.notify_all()

    def fits(self, size: int) -> bool:
        """Whether slots for snapshots of this size are here, and not much more than that."""
        return aligned(size) <= self.size <= 2 * aligned(size)

    def slot(self, number: int) -> memoryview:
        return self._view[number * self.size : (number + 1) * self.size]

    def open(self, number: int) -> None:
        """The slot's bytes are about to change: readers that kept its stamp have lost it."""
        # from even to odd; from odd, of a snapshot that came to nothing, to the next odd
        self._stamps[number] += 1 + self._stamps[number] % 2

    def seal(self, number: int) -> int:
        """The slot is whole; its stamp from now on."""
        assert self._stamps[number] % 2
        self._stamps[number] += 1
        return self._stamps[number]

    def stamp(self, number: int) -> int:
        return self._stamps[number]


def require(needed: int, *, free: int, what: str, where: str) -> None:
    """MemoryTooSmall, with the figures, unless `needed` bytes and a little more are free."""
    if needed > free * (1 - SPARE):
        raise MemoryTooSmall(what=what, where=where, needed=needed, free=free)
