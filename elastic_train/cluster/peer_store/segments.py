"""Shared-memory segments for snapshots, locked by the peer store that created them.

Python's own shared memory dies with the process that made it, and with any that merely looked: these are
plain files, and what a dead peer store left is found by its lock, which the kernel has given back. The lock
is taken before the file has any bytes, so a peer store may die at any moment.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from elastic_train.checkpoint.engine.arena import Arena
from elastic_train.errors import MemoryTooSmall

DIRECTORY = Path("/dev/shm")
PREFIX = "elastic_train-"
KINDS = (f"{PREFIX}*", f".{PREFIX}*")
"""All names that segments have, those of older releases included, whose segments began as hidden files."""
_OPEN: list[int] = []
"""Ends of pipes that this process holds as long as it lives."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Segment:
    path: Path
    arena: Arena
    lock: int  # descriptor

    @property
    def size(self) -> int:
        """Bytes."""
        return self.arena.slots * self.arena.size

    def drop(self) -> None:
        """Its name goes now, its memory when nobody maps it any more."""
        self.path.unlink(missing_ok=True)
        os.close(self.lock)


def create(name: str, size: int, *, slots: int, directory: Path = DIRECTORY) -> Segment:
    """A new segment; MemoryTooSmall, with the figures, where it doesn't fit."""
    path = directory / f"{PREFIX}{name}"
    path.unlink(missing_ok=True)
    lock = _locked(path)
    try:
        return Segment(path=path, arena=Arena.create(path, size, slots=slots), lock=lock)
    except BaseException:
        os.close(lock)
        raise


def check_allowed(needed: int, *, taken: int, bound: int | None, what: str) -> None:
    """MemoryTooSmall where so many bytes beside those that are taken are more than a person allows."""
    if bound is not None and taken + needed > bound:
        where = "what Checkpoints(peer_bytes=...) leaves of its node"
        raise MemoryTooSmall(what=what, where=where, needed=needed, free=max(bound - taken, 0))


def remove_in_the_end(name: str, directory: Path = DIRECTORY) -> None:
    """Have the segments that this process makes, whose names begin with `name` and end with its id, removed
    when it ends, however it does: with its node's Ray processes nobody may be left who sweeps.

    A shell waits for the other end of a pipe to close. It is nobody's child: what ends this process and its
    children does not reach it.
    """
    theirs, ours = os.pipe()  # ours is closed by the kernel
    wait = 'exec 3<&0; (read -r _ <&3; rm -f -- "$0"*"$1") >/dev/null 2>&1 &'
    command = ["sh", "-c", wait, f"{directory / PREFIX}{name}", f"-{os.getpid()}"]
    subprocess.run(command, stdin=theirs, start_new_session=True, check=True)
    os.close(theirs)
    _OPEN.append(ours)


def sweep(directory: Path = DIRECTORY) -> list[str]:
    """Remove the segments of peer stores that are gone, whatever run they were of; their names."""
    gone: list[str] = []
    for path in sorted(path for kind in KINDS for path in directory.glob(kind)):
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


def _locked(path: Path) -> int:
    """A new file at a path with a lock on it; the descriptor that holds it."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return descriptor
        os.close(descriptor)  # a sweep came between the two lines
