"""Captured output of a job's processes, as parts of JSON lines in the run's storage.

The last part of a process is written anew while it grows, so that what was printed lately is there; a full
one is never touched again. Of a process that prints more than fits, the first part and the newest ones stay.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Literal

from elastic_train.errors import StorageError, StorageNotFound
from elastic_train.storage.store import Store

DIRECTORY = "output"
PART_BYTES = 64 << 10
PARTS = 32
"""Parts of a process that stay."""
FILES = 2048
"""Parts of a run that stay when another process begins."""
QUIET = 8
"""Looks without a new line after which a part is read every so many looks."""
_NAME = re.compile(rf"{DIRECTORY}/(.+)-(\d{{6}})\.jsonl")


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputLine:
    """A line that a process of the job printed; `rank` is -1 where it had none."""

    at: str  # UTC, ISO 8601
    worker: str
    rank: int
    stream: Literal["out", "err"]
    text: str


def output_text(line: OutputLine) -> str:
    """A line for people: when and who, then what was printed."""
    who = f"rank {line.rank}" if line.rank >= 0 else line.worker
    return f"[{line.at[11:19]}] {who} | {line.text}"


class OutputWriter:
    """The writing end, of one process. `add` and `flush` may be called from different threads."""

    def __init__(self, store: Store, process: str) -> None:
        self._store, self._process = store, process
        self._lines: list[str] = []  # of the present part and beyond
        self._part, self._written, self._deleted = 1, 0, 1
        self._lock = threading.Lock()

    def make_room(self) -> None:
        """Once, before the first line: remove what processes long ago printed."""
        names = [name for name in self._store.list(DIRECTORY) if _NAME.fullmatch(name)]
        if len(names) > FILES:
            self._store.delete(sorted(names)[: len(names) - FILES])

    def add(self, lines: Sequence[OutputLine]) -> None:
        with self._lock:
            self._lines += [json.dumps(asdict(line), separators=(",", ":")) for line in lines]

    @property
    def waiting(self) -> bool:
        """Whether lines are not in storage yet."""
        return len(self._lines) > self._written

    def flush(self) -> None:
        """Bring the lines to storage. After a StorageError nothing is lost: call it again."""
        while self.waiting:
            with self._lock:
                count = _fitting(self._lines)
                data = ("\n".join(self._lines[:count]) + "\n").encode()
            self._store.write(self._name(self._part), data)
            with self._lock:
                self._written = count
                if len(data) < PART_BYTES:
                    return
                del self._lines[:count]
                self._part, self._written = self._part + 1, 0
            if self._part - self._deleted > PARTS:
                self._deleted += 1
                self._store.delete([self._name(self._deleted)])

    def _name(self, part: int) -> str:
        return f"{DIRECTORY}/{self._process}-{part:06d}.jsonl"


class OutputReader:
    """Reads what was printed since it was last asked. `only_new`: nothing of earlier processes."""

    def __init__(self, store: Store, *, only_new: bool = False) -> None:
        self._store = store
        self._over = set[str]()
        self._looks, self._quiet = 0, dict[str, int]()  # and how often nothing new was in a part
        if only_new:
            with suppress(StorageError):  # then what was printed before is shown, too
                self._over |= set(store.list(DIRECTORY))
        self._printed: dict[str, int] = {}

    def new(self, *, every: bool = False) -> list[OutputLine]:
        """In the order of time; with `every` also of processes that are silent, and so looked at rarely."""
        names = sorted(n for n in self._store.list(DIRECTORY) if n not in self._over and _NAME.fullmatch(n))
        full = {a for a, b in pairwise(names) if a.rpartition("-")[0] == b.rpartition("-")[0]}
        self._looks += 1
        due = [name for name in names if every or name in full or self._is_due(name)]
        found = [line for name in due for line in self._of(name)]
        self._over |= full
        return sorted(found, key=lambda line: line.at)

    def any(self) -> bool:
        """Whether anything was printed at all."""
        return any(n not in self._over and _NAME.fullmatch(n) for n in self._store.list(DIRECTORY))

    def _is_due(self, name: str) -> bool:
        """Processes that are silent, most of them because they ended, are looked at more rarely."""
        return self._quiet.get(name, 0) < QUIET or self._looks % QUIET == 0

    def _of(self, name: str) -> Iterator[OutputLine]:
        try:
            lines = self._store.read(name).decode().splitlines()
        except StorageNotFound:  # made room for newer ones
            return
        printed = self._printed.get(name, 0)
        self._printed[name] = len(lines)
        self._quiet[name] = 0 if len(lines) > printed else self._quiet.get(name, 0) + 1
        for line in lines[printed:]:
            yield OutputLine(**json.loads(line))


def _fitting(lines: Sequence[str]) -> int:
    """How many of the lines are one part: as many as reach its size."""
    size = 0
    for count, line in enumerate(lines, start=1):
        size += len(line) + 1
        if size >= PART_BYTES:
            return count
    return len(lines)
