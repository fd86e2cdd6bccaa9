"""The journal: append-only parts of JSON lines, each part created once and never changed.

Parts of one term sort before those of the next, so a reader needs nothing but the names.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

from elastic_train.errors import AlreadyExists
from elastic_train.storage.store import Store

DIRECTORY = "journal"


class Journal:
    """The writing end, of one term. `append` and `flush` may be called from different threads."""

    def __init__(self, store: Store, term: int) -> None:
        self._store, self._term = store, term
        self._part = 0
        self._lines: list[str] = []
        self._lines_lock = threading.Lock()
        self._flush_lock = threading.Lock()

    @property
    def waiting(self) -> int:
        """Lines that are not durable yet."""
        return len(self._lines)

    def append(self, record: dict[str, Any]) -> None:
        line = json.dumps(record, separators=(",", ":"))
        with self._lines_lock:
            self._lines.append(line)

    def flush(self) -> None:
        """Make every appended line durable. After a StorageError nothing is lost: call it again."""
        with self._flush_lock:
            count = len(self._lines)
            if not count:
                return
            data = ("\n".join(self._lines[:count]) + "\n").encode()
            name = f"{DIRECTORY}/t{self._term:06d}-{self._part + 1:08d}.jsonl"
            try:
                self._store.create(name, data)
            except AlreadyExists:
                # An earlier try got through although its answer did not; more lines came since.
                data = self._store.read(name)
                count = data.count(b"\n")
            self._part += 1
            with self._lines_lock:
                del self._lines[:count]


def read_journal(store: Store, after: str = "") -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Parts in order, as (name, records); `after` skips the parts up to that name."""
    for name in store.list(DIRECTORY):
        if name > after and name.endswith(".jsonl"):
            text = store.read(name).decode()
            yield name, [json.loads(line) for line in text.splitlines()]
