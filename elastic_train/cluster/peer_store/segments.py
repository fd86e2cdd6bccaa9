"""Files in shared memory that hold snapshots. The peer store that made one keeps a lock on it while it lives.

Python's own shared memory dies with the process that made it, and with any that merely looked: these are
plain files, and what a dead peer store left is found by its lock, which the kernel has given back.
"""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass
from pathlib import Path

from elastic_train.checkpoint.engine.arena import Arena

DIRECTORY = Path("/dev/shm")
PREFIX = "elastic_train-"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Segment:
    path: Path
    arena: Arena
    lock: int  # descriptor

    def drop(self) -> None:
        """Its name goes now, its memory when nobody maps it any more."""
        self.path.unlink(missing_ok=True)
        os.close(self.lock)


def create(name: str, size: int, *, slots: int, directory: Path = DIRECTORY) -> Segment:
    """A new segment; MemoryTooSmall, with the figures, where it doesn't fit."""
    path, unlocked = directory / f"{PREFIX}{name}", directory / f".{PREFIX}{name}"
    unlocked.unlink(missing_ok=True)
    arena = Arena.create(unlocked, size, slots=slots)
    descriptor = os.open(unlocked, os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    unlocked.rename(path)  # only now may a sweep see it
    return Segment(path=path, arena=arena, lock=descriptor)


def sweep(directory: Path = DIRECTORY) -> list[str]:
    """Remove the segments of peer stores that are gone, whatever run they were of; their names."""
    gone: list[str] = []
    for path in sorted(directory.glob(f"{PREFIX}*")):
        try:
            descriptor = os.open(path, os.O_RDWR)
        except OSError:  # another sweep was faster, or it is another user's
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            gone.append(path.name)
        except BlockingIOError:
            pass
        finally:
            os.close(descriptor)
    return gone
