"""The journal: what happened to a run, as one sequence of parts, each created once and never changed.

The writer of a new term reads what there is and then takes the next slot. Whoever was ousted wants a slot
that the new term holds by then: what it could not make durable in time never gets in, however late its
network comes back. So a journal means what its last writer took it to mean.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Iterator
from typing import Any

from elastic_train.errors import AlreadyExists, Fenced
from elastic_train.storage.commit_log import CommitLog
from elastic_train.storage.journal_parts import (
    Part,
    encode,
    in_force,
    read_part,
    read_parts,
    slot_of,
    slots,
)
from elastic_train.storage.store import Store


class Journal:
    """The writing end, of one term. `append` and `flush` may be called from different threads.

    `log` is the run's commit log, whose fences are looked at before anything is written.
    """

    def __init__(self, store: Store, term: int, *, log: CommitLog | None = None) -> None:
        self._store, self._term = store, term
        self._log = log or CommitLog(store)
        self._writer = secrets.token_hex(8)
        self._slot = 0  # the next one to take; 0 before the end of the journal was looked for
        self._over: Fenced | None = None
        self._lines: list[str] = []
        self._lines_lock = threading.Lock()
        self._flush_lock = threading.Lock()

    @property
    def waiting(self) -> int:
        """Lines that are not durable yet."""
        return len(self._lines)

    def begin(self) -> list[Part]:
        """Take the slot after everything that is there, and return that: nothing will come in between.

        Raises Fenced if a higher term was there before.
        """
        with self._flush_lock:
            found: list[Part] = []
            while True:
                last = found[-1].slot if found else 0
                found += read_parts(self._store, [slot for slot in slots(self._store) if slot > last])
                self._slot = found[-1].slot + 1 if found else 1
                if self._create(()) is not None:
                    return list(in_force(found))

    def append(self, record: dict[str, Any]) -> None:
        line = json.dumps(record, separators=(",", ":"))
        with self._lines_lock:
            self._lines.append(line)

    def flush(self) -> None:
        """Make every appended line durable. After a StorageError nothing is lost: call it again.

        Fenced if a higher term began: then nothing more is written, by this call or a later one.
        """
        with self._flush_lock:
            lines = tuple(self._lines)
            if not lines:
                return
            if not self._slot:
                self._slot = max(slots(self._store), default=1)
            while (durable := self._create(lines)) is None:
                pass
            with self._lines_lock:
                del self._lines[:durable]

    def _create(self, lines: tuple[str, ...]) -> int | None:
        """Try to take the next slot: how many lines are in it, None if it is another's."""
        self._check()
        part = Part(slot=self._slot, term=self._term, writer=self._writer, lines=lines)
        try:
            self._store.create(part.name, encode(part))
        except AlreadyExists:
            # An earlier try may have got through although its answer did not; more lines came since.
            part = read_part(self._store, self._slot)
        self._slot += 1
        if part.term > self._term:
            self._end(part.term)
        return len(part.lines) if part.writer == self._writer else None

    def _check(self) -> None:
        """Raise Fenced if a higher term began."""
        if self._over is not None:
            raise self._over
        newest = self._log.newest_term()
        if newest > self._term:
            self._end(newest)

    def _end(self, by_term: int) -> None:
        self._over = Fenced(run=self._store.url, term=self._term, by_term=by_term)
        raise self._over


def read_journal(store: Store, after: str = "") -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Parts in order, as (name, records); `after` skips the parts up to that name."""
    seen = slot_of(after) or 0
    found = read_parts(store, [slot for slot in slots(store) if slot > seen])
    for part in in_force(found):
        yield part.name, part.records
