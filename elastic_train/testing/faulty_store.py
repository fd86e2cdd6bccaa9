"""A store that fails on schedule: a real one with faults at named calls, or at a byte that it writes."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from elastic_train.errors import StorageError, StorageNotFound
from elastic_train.storage.store import Blocks, Buffer, Names, Sink, Store

WRITES = ("write", "create", "stream", "delete", "delete_tree")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fail:
    """The `call`-th call (from 1; 0 for every) of an operation raises a StorageError that retries did not
    cure.
    """

    operation: str
    call: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FailAt:
    """The `call`-th call of all (from 1) raises a StorageError, whatever it is."""

    call: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Blind:
    """The `call`-th listing (from 1) finds nothing, as one whose errors are swallowed."""

    call: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Absent:
    """The `call`-th read (from 1) finds nothing, although something is there."""

    call: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Delay:
    """Every call of an operation takes this much longer."""

    operation: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Slow:
    """What is written takes its time: so many bytes a second."""

    bytes_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Full:
    """The device holds this many more bytes: the write that exceeds them raises ENOSPC."""

    after_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KillAtByte:
    """The process kills itself once this many bytes were handed to the store."""

    byte: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KillAtWrite:
    """The process kills itself right before (or after) the `call`-th operation that changes the store."""

    call: int
    after: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """The `call`-th call of an operation says `reached` and waits for `go` before it is performed."""

    operation: str
    call: int
    reached: threading.Event
    go: threading.Event


Fault = Fail | FailAt | Blind | Absent | Delay | Slow | Full | KillAtByte | KillAtWrite | Hold


class FaultyStore:
    """Passes every call on to a real store, unless the schedule says otherwise, and counts calls."""

    def __init__(self, inner: Store, faults: Sequence[Fault]) -> None:
        self._inner, self._faults = inner, tuple(faults)
        self.calls: dict[str, int] = {}
        self.total = 0
        self._acts: dict[int, Callable[[], None]] = {}
        self.written = 0
        self.changes = 0  # operations that changed the store

    def before(self, call: int, act: Callable[[], None]) -> None:
        """Do something right before the `call`-th call of all."""
        self._acts[call] = act

    @property
    def url(self) -> str:
        return self._inner.url

    def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
        with self._operation("read", path):
            return self._inner.read(path, start, length)

    def read_ranges(self, path: str, ranges: Sequence[tuple[int, int]]) -> Blocks:
        with self._operation("read_ranges", path):
            return self._inner.read_ranges(path, ranges)

    def read_into(self, path: str, start: int, buffers: Sequence[memoryview]) -> None:
        with self._operation("read", path):
            self._inner.read_into(path, start, buffers)

    def write(self, path: str, data: Buffer) -> None:
        with self._operation("write", path):
            if self._spend(len(data), path) is not None:
                _die()
            self._inner.write(path, data)

    def create(self, path: str, data: Buffer) -> None:
        with self._operation("create", path):
            if self._spend(len(data), path) is not None:
                _die()
            self._inner.create(path, data)

    @contextmanager
    def stream(self, path: str) -> Iterator[Sink]:
        with self._operation("stream", path), self._inner.stream(path) as sink:
            yield _FaultySink(self, sink, path)

    def list(self, prefix: str = "") -> Names:
        with self._operation("list", prefix):
            found = self._inner.list(prefix)
        blind = any(isinstance(f, Blind) and f.call == self.calls["list"] for f in self._faults)
        return [] if blind else found

    def names(self, prefix: str = "") -> Names:
        with self._operation("names", prefix):
            return self._inner.names(prefix)

    def unfinished(self, prefix: str = "") -> Names:
        with self._operation("unfinished", prefix):
            return self._inner.unfinished(prefix)

    def size(self, path: str) -> int:
        with self._operation("size", path):
            return self._inner.size(path)

    def exists(self, path: str) -> bool:
        with self._operation("exists", path):
            return self._inner.exists(path)

    def delete(self, paths: Iterable[str]) -> None:
        for path in paths:  # one after the other, so that a deletion can stop half-way
            with self._operation("delete", path):
                self._inner.delete([path])

    def delete_tree(self, prefix: str) -> None:
        self.delete(self._inner.list(prefix))
        with self._operation("delete_tree", prefix):
            self._inner.delete_tree(prefix)

    def discard(self, names: Iterable[str]) -> None:
        for name in names:
            with self._operation("discard", name):
                self._inner.discard([name])

    @contextmanager
    def _operation(self, name: str, path: str) -> Iterator[None]:
        call = self.calls[name] = self.calls.get(name, 0) + 1
        self.total += 1
        if (act := self._acts.pop(self.total, None)) is not None:
            act()
        self.changes += name in WRITES
        kills = [f.after for f in self._faults if isinstance(f, KillAtWrite) and f.call == self.changes]
        for fault in self._faults:
            match fault:
                case Fail(operation=operation, call=k) if operation == name and k in (0, call):
                    raise StorageError(path=path, operation=name, problem="a scheduled fault.")
                case FailAt(call=k) if k == self.total:
                    raise StorageError(path=path, operation=name, problem="a scheduled fault.")
                case Absent(call=k) if name == "read" and k == call:
                    raise StorageNotFound(path=path, operation=name, problem="a scheduled fault.")
                case Delay(operation=operation, seconds=seconds) if operation == name:
                    time.sleep(seconds)
                case Hold(operation=operation, call=k, reached=reached, go=go) if (operation, k) == (
                    name,
                    call,
                ):
                    reached.set()
                    go.wait()
                case _:
                    pass
        if name in WRITES and False in kills:
            _die()
        yield
        if name in WRITES and True in kills:
            _die()

    def _spend(self, size: int, path: str) -> int | None:
        """Count bytes about to be written: None if all may, else how many before the process dies."""
        before, self.written = self.written, self.written + size
        for fault in self._faults:
            match fault:
                case Full(after_bytes=limit) if self.written > limit:
                    self.written = before
                    problem = f"{os.strerror(errno.ENOSPC)} (scheduled)"
                    raise StorageError(path=path, operation="write", problem=problem)
                case Slow(bytes_s=bytes_s):
                    time.sleep(size / bytes_s)
                case KillAtByte(byte=byte) if before < byte <= self.written:
                    return byte - before
                case _:
                    pass
        return None


class _FaultySink:
    def __init__(self, store: FaultyStore, sink: Sink, path: str) -> None:
        self._store, self._sink, self._path = store, sink, path

    def write(self, data: Buffer) -> None:
        view = memoryview(data).cast("B") if len(data) else memoryview(b"")
        allowed = self._store._spend(len(view), self._path)
        self._sink.write(view[:allowed])
        if allowed is not None:
            _die()


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
