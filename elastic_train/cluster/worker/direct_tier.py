"""The peer tier of a worker without a peer store: each snapshot goes from its own memory to storage."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from elastic_train.checkpoint.engine.arena import Arena
from elastic_train.checkpoint.snapshot import Snapshot
from elastic_train.cluster.checkpoint_io import PartWriter

SLOTS = 2
"""Snapshots that a worker holds on their way to storage: one being written, one being copied."""


class DirectTier:
    """Takes snapshots for storage alone, and writes them on threads that training never waits for."""

    every_step = False

    def __init__(self, writer: PartWriter, note: Callable[[str], None]) -> None:
        self._writer, self._note = writer, note
        self._arena: Arena | None = None
        self._writing: set[Snapshot] = set()
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(max_workers=2 * SLOTS, thread_name_prefix="to storage")

    @property
    def binding(self) -> bool:
        return False

    def memory(self, generation: int, size: int) -> Arena:
        """What was there before where it fits: what is in use of it is being written."""
        if self._arena is None or not self._arena.fits(size):
            self._arena = None  # before there is another
            self._arena = Arena.private(size, slots=SLOTS)
        return self._arena

    def count_step(self) -> None:
        return None

    def step_took(self, seconds: float) -> None:
        return None

    def ready(self, timeout: float) -> bool:
        return True

    def crowded(self, *, storage: bool) -> bool:
        with self._lock:
            return not storage or bool(self._writing)

    def begun(self, step: int) -> None:
        return None

    def dropped(self, step: int) -> None:
        return None

    def deliver(self, snapshot: Snapshot) -> None:
        with self._lock:
            self._writing.add(snapshot)
        self._threads.submit(self.write, snapshot)

    def write(self, snapshot: Snapshot) -> None:
        """Write one to storage, and say so; returns when it is done or has failed."""
        with self._lock:
            self._writing.add(snapshot)
        try:
            self._writer.save(snapshot)
        except Exception as error:  # noqa: BLE001 - becomes an event; a thread's error would be lost
            self.failed(snapshot, error)
        finally:
            with self._lock:
                self._writing.discard(snapshot)

    def failed(self, snapshot: Snapshot, error: Exception) -> None:
        """Give a snapshot up: its slot is free again, and a checkpoint that it was for has failed."""
        problem = f"{type(error).__name__}: {error}"
        self._note(f"the snapshot of step {snapshot.step} failed: {problem}")
        snapshot.buffer.release()
        if snapshot.storage:
            self._writer.failed(snapshot, problem)
