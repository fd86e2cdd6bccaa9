"""A store as bad as one can be that loses nothing: what is seen may be old, what is told may not be so.

A network file system shows a directory as it was, an answer is lost after its work was done, a request comes
in after whoever sent it gave up. What was acknowledged stays, and of several creations one wins.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from elastic_train.errors import AlreadyExists, StorageNotFound, StorageUnavailable
from elastic_train.storage.store import Blocks, Buffer, Names, Sink, directly_in, exactly, spread


@dataclass(slots=True)
class Truth:
    """What is stored, and all that ever was: `history` has each path's contents (None: deleted) by the number
    of the change.
    """

    objects: dict[str, bytes] = field(default_factory=dict[str, bytes])
    history: list[tuple[str, bytes | None]] = field(default_factory=list[tuple[str, bytes | None]])
    late: list[Callable[[], object]] = field(default_factory=list[Callable[[], object]])

    def put(self, path: str, data: bytes | None) -> None:
        self.history.append((path, data))
        if data is None:
            self.objects.pop(path, None)
        else:
            self.objects[path] = data

    def create(self, path: str, data: bytes) -> bool:
        if path in self.objects:
            return False
        self.put(path, data)
        return True

    def arrive(self, draw: random.Random, *, all_of_them: bool = False) -> None:
        """What was under way comes in, in any order."""
        draw.shuffle(self.late)
        while self.late and (all_of_them or draw.random() < 0.3):
            self.late.pop()()


class LyingStore:
    """One client's view of a truth that others change, too. `lies` is how often a call meets trouble; for how
    many calls it sees what was is drawn.
    """

    def __init__(self, truth: Truth, draw: random.Random, *, lies: float) -> None:
        self._truth, self._draw, self._lies = truth, draw, lies
        self._seen: dict[str, bytes] | None = None  # while it sees what was
        self._until = 0
        self.calls = 0

    @property
    def url(self) -> str:
        return "process-memory:lying"

    def be_honest(self) -> None:
        """From now on it shows what is, and does what it says."""
        self._lies, self._seen = 0.0, None

    def _now(self) -> dict[str, bytes]:
        """What this client sees."""
        self.calls += 1
        self._truth.arrive(self._draw)
        if self._seen is not None and self.calls >= self._until:
            self._seen = None
        if self._seen is None and self._draw.random() < self._lies:
            self._seen = dict(self._truth.objects)
            self._until = self.calls + self._draw.choice((1, 3, 10, 40))
        return self._truth.objects if self._seen is None else self._seen

    def _change(self, path: str, data: bytes | None) -> None:
        self._truth.put(path, data)
        self._saw(path, data)

    def _saw(self, path: str, data: bytes | None) -> None:
        if self._seen is not None and data is None:
            self._seen.pop(path, None)
        elif self._seen is not None and data is not None:
            self._seen[path] = data

    def _unanswered(self, path: str, operation: str, work: Callable[[], object]) -> None:
        """Now and then nobody hears of a change: it is done, or will be, or never is."""
        self._now()
        if self._draw.random() >= self._lies:
            return
        fate = self._draw.randrange(3)
        if fate == 0:
            work()
        elif fate == 1:
            self._truth.late.append(work)
        raise StorageUnavailable(path=path, operation=operation, problem="no answer.")

    def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
        data = self._now().get(path)
        if data is None:
            raise StorageNotFound(path=path, operation="read", problem="nothing is there.")
        end = None if length is None else start + length
        return exactly(data[start:end], path=path, start=start, length=length)

    def read_ranges(self, path: str, ranges: Sequence[tuple[int, int]]) -> Blocks:
        return [self.read(path, start, length) for start, length in ranges]

    def read_into(self, path: str, start: int, buffers: Sequence[memoryview]) -> None:
        spread(self.read(path, start, sum(map(len, buffers))), buffers)

    def write(self, path: str, data: Buffer) -> None:
        told = bytes(data)
        self._unanswered(path, "write", lambda: self._truth.put(path, told))
        self._change(path, told)

    def create(self, path: str, data: Buffer) -> None:
        """An answer that is lost is asked for again, as a store does: what it finds then is its own."""
        told = bytes(data)
        self._unanswered(path, "create", lambda: self._truth.create(path, told))
        twice = self._draw.random() < self._lies
        if not self._truth.create(path, told) or twice:
            raise AlreadyExists(path=path, operation="create", problem="the name is taken.")
        self._saw(path, told)

    @contextmanager
    def stream(self, path: str) -> Iterator[Sink]:
        parts: list[bytes] = []

        class Parts:
            def write(self, data: Buffer) -> None:
                parts.append(bytes(data))

        yield Parts()
        self.write(path, b"".join(parts))

    def list(self, prefix: str = "") -> Names:
        return sorted(p for p in self._now() if not prefix or p.startswith(prefix + "/"))

    def names(self, prefix: str = "") -> Names:
        return directly_in(prefix, self.list(prefix))

    def unfinished(self, prefix: str = "") -> Names:
        return []

    def size(self, path: str) -> int:
        return len(self.read(path))

    def exists(self, path: str) -> bool:
        return path in self._now()

    def delete(self, paths: Iterable[str]) -> None:
        for path in paths:
            self._unanswered(path, "delete", lambda p=path: self._truth.put(p, None))
            self._change(path, None)

    def delete_tree(self, prefix: str) -> None:
        self.delete(self.list(prefix))

    def discard(self, names: Iterable[str]) -> None:
        self.delete(names)
