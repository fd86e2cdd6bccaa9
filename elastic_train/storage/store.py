"""Store protocol: what every storage backend can do.

Paths are relative to the store's root, `/`-separated, without empty, `.` or `..` segments; every other
character is itself (spaces, `#`, `=`, `?`, any letter), nothing is decoded or treated as a pattern.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from elastic_train.errors import StorageError, StorageNotFound, StorageUnavailable

Buffer = bytes | bytearray | memoryview
Names = list[str]
Blocks = list[bytes]

UNPUBLISHED = ".tmp-"
"""How the names of files begin that a POSIX store is still writing; no path of a caller may."""


class Sink(Protocol):
    """Takes the bytes of one object in order."""

    def write(self, data: Buffer) -> None: ...


class Store(Protocol):
    """Named byte strings. Safe to use from several threads.

    Transient failures are retried inside; what is raised is final: StorageNotFound, AlreadyExists or another
    StorageError.
    """

    @property
    def url(self) -> str: ...

    def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
        """`length` bytes from `start`, or all that follow; StorageError where the object is shorter."""
        ...

    def read_ranges(self, path: str, ranges: Sequence[tuple[int, int]]) -> Blocks:
        """One block per (start, length), as `read` has them, fetched together where the store can."""
        ...

    def read_into(self, path: str, start: int, buffers: Sequence[memoryview]) -> None:
        """The bytes from `start` on into writable buffers of bytes, one after the other, until all are full.

        After an error they hold anything.
        """
        ...

    def write(self, path: str, data: Buffer) -> None:
        """Publish or replace an object: readers see the old or the new one, and the new one is durable."""
        ...

    def create(self, path: str, data: Buffer) -> None:
        """Publish an object where there is none; of several callers exactly one wins, else AlreadyExists."""
        ...

    def stream(self, path: str) -> AbstractContextManager[Sink]:
        """Publish an object piece by piece: durable after a clean exit, nothing at all after an exception."""
        ...

    def list(self, prefix: str = "") -> Names:
        """Paths of all published objects under a directory, at any depth, sorted."""
        ...

    def names(self, prefix: str = "") -> Names:
        """Names of the published objects directly in a directory, sorted; nothing deeper is looked at."""
        ...

    def unfinished(self, prefix: str = "") -> Names:
        """What killed writers left under a directory and nobody can read; `delete_tree` removes it."""
        ...

    def size(self, path: str) -> int: ...

    def exists(self, path: str) -> bool: ...

    def delete(self, paths: Iterable[str]) -> None:
        """Remove objects; what is already gone is no error."""
        ...

    def delete_tree(self, prefix: str) -> None:
        """Remove everything under a directory, unfinished writes included."""
        ...

    def discard(self, names: Iterable[str]) -> None:
        """Remove unfinished writes that `unfinished` named and nothing else."""
        ...


def read_taken(store: Store, path: str) -> bytes:
    """What is at a path that a creation found taken. Where a read does not find it, the directory is seen as
    it was: StorageUnavailable, as that passes.
    """
    try:
        return store.read(path)
    except StorageNotFound as error:
        problem = "its name is taken and nothing is there: this machine sees the storage as it was."
        raise StorageUnavailable(path=f"{store.url}/{path}", operation="read", problem=problem) from error


def check_path(path: str) -> str:
    """The path itself, if it names an object of a store."""
    parts = path.split("/")
    if any(p in ("", ".", "..") or p.startswith(UNPUBLISHED) for p in parts) or "\0" in path:
        raise StorageError(path=repr(path), operation="use", problem="not a usable path inside a store.")
    try:
        os.fsencode(path)
    except UnicodeEncodeError as error:
        problem = "no file can have this name."
        raise StorageError(path=ascii(path), operation="use", problem=problem) from error
    return path


def check_prefix(prefix: str) -> str:
    """The directory's path without a trailing slash; "" is the root."""
    prefix = prefix.rstrip("/")
    return check_path(prefix) if prefix else ""


def directly_in(prefix: str, paths: Iterable[str]) -> Names:
    """The names of those objects that lie in no directory inside of the prefix."""
    lead = f"{prefix.rstrip('/')}/" if prefix else ""
    return [name for path in paths if "/" not in (name := path.removeprefix(lead))]


def spread(data: bytes, buffers: Sequence[memoryview]) -> None:
    """Copy bytes into buffers, one after the other."""
    at = 0
    for buffer in buffers:
        buffer[:] = data[at : at + len(buffer)]
        at += len(buffer)


def exactly(data: bytes, *, path: str, start: int, length: int | None) -> bytes:
    """The bytes of a read, if the object had as many as were asked for."""
    if length is not None and len(data) != length:
        raise short(path, start=start, length=length, there=len(data))
    return data


def short(path: str, *, start: int, length: int, there: int) -> StorageError:
    return StorageError(
        path=path,
        operation="read",
        problem=f"{length} bytes were wanted at byte {start} and only {there} are there.",
    )
