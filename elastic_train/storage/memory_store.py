"""A store in this process's memory: a real one, gone with the process."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from elastic_train.errors import AlreadyExists, StorageNotFound
from elastic_train.storage.store import (
    Blocks,
    Buffer,
    Names,
    Sink,
    check_path,
    check_prefix,
    directly_in,
    exactly,
    spread,
)


class MemoryStore:
    """Objects in a dictionary under one lock."""

    def __init__(self, name: str = "memory") -> None:
        self._name = name
        self._objects: dict[str, bytes] = {}
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"process-memory:{self._name}"

    def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
        with self._lock:
            data = self._objects.get(check_path(path))
        if data is None:
            raise StorageNotFound(path=path, operation="read", problem="nothing is there.")
        end = None if length is None else start + length
        return exactly(data[start:end], path=path, start=start, length=length)

    def read_ranges(self, path: str, ranges: Sequence[tuple[int, int]]) -> Blocks:
        return [self.read(path, start, length) for start, length in ranges]

    def read_into(self, path: str, start: int, buffers: Sequence[memoryview]) -> None:
        spread(self.read(path, start, sum(map(len, buffers))), buffers)

    def write(self, path: str, data: Buffer) -> None:
        with self._lock:
            self._objects[check_path(path)] = bytes(data)

    def create(self, path: str, data: Buffer) -> None:
        with self._lock:
            if check_path(path) in self._objects:
                raise AlreadyExists(path=path, operation="create", problem="the name is taken.")
            self._objects[path] = bytes(data)

    @contextmanager
    def stream(self, path: str) -> Iterator[Sink]:
        sink = Collected()
        yield sink
        self.write(path, bytes(sink.data))

    def list(self, prefix: str = "") -> Names:
        prefix = check_prefix(prefix)
        with self._lock:
            return sorted(p for p in self._objects if not prefix or p.startswith(prefix + "/"))

    def names(self, prefix: str = "") -> Names:
        return directly_in(prefix, self.list(prefix))

    def unfinished(self, prefix: str = "") -> Names:
        return []

    def size(self, path: str) -> int:
        with self._lock:
            if check_path(path) not in self._objects:
                raise StorageNotFound(path=path, operation="look at", problem="nothing is there.")
            return len(self._objects[path])

    def exists(self, path: str) -> bool:
        with self._lock:
            return check_path(path) in self._objects

    def delete(self, paths: Iterable[str]) -> None:
        with self._lock:
            for path in paths:
                self._objects.pop(check_path(path), None)

    def delete_tree(self, prefix: str) -> None:
        self.delete(self.list(prefix))

    def discard(self, names: Iterable[str]) -> None:
        """Nothing is ever unfinished here."""


class Collected:
    """A sink that keeps what it is given."""

    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, data: Buffer) -> None:
        self.data += data
