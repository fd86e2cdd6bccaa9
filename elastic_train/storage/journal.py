"""Journal writer: the run's events as one sequence of parts, each created once and never changed.

The writer of a new term reads what there is and then takes the next slot. A controller that was ousted
wants a slot that the new term holds by then: what it could not make durable in time never gets in, however
late its network comes back. So a journal means what its last writer took it to mean.

Now and then the writer keeps the state that all lines so far lead to, beside the slot up to which it covers
them. Parts before that slot go into the history. So what is read at a start does not grow with a run's age.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
from dataclasses import dataclass
from typing import Any

from elastic_train.errors import AlreadyExists, Fenced, StorageError
from elastic_train.storage.commit_log import CommitLog
from elastic_train.storage.compacted_journal import spans, write_history
from elastic_train.storage.journal_parts import (
    Part,
    encode,
    in_force,
    part_path,
    read_part,
    read_parts,
    slots,
)
from elastic_train.storage.journal_reading import (
    Covering,
    covering_path,
    coverings,
    encode_covering,
    newest_covering,
    parts_after,
    read_journal,
)
from elastic_train.storage.store import Store

__all__ = ["Journal", "Past", "read_journal"]
log = logging.getLogger(__name__)
WAITING_BYTES = 64 << 20
"""Bytes of lines that may wait for storage. Beyond that the history has a gap where a state covers it."""
STATES = 2
"""States that stay: a reader may be at the older one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """What came before a term: a state, if there is one, and the parts after it. `end` is the term's slot."""

    covering: Covering | None
    parts: list[Part]
    end: int


class Journal:
    """The writing end, of one term. `append`, `keep` and `flush` may be called from different threads.

    `log` is the run's commit log, whose fences are looked at before anything is written.
    """

    def __init__(
        self, store: Store, term: int, *, log: CommitLog | None = None, waiting_bytes: int = WAITING_BYTES
    ) -> None:
        self._store, self._term = store, term
        self._log = log or CommitLog(store)
        self._limit = waiting_bytes
        self._writer = secrets.token_hex(8)
        self._slot = 0  # the next one to take; 0 before the end of the journal was looked for
        self._covered = 0  # the slot that the newest state covers
        self._over: Fenced | None = None
        self._lines: list[str] = []
        self._first = 0  # the number of the oldest line that waits
        self._bytes = 0
        self._kept: tuple[int, dict[str, Any]] | None = None  # the number of the line after it, and the state
        self._gap = 0  # lines that were given up
        self._gap_open = False  # and no state covers them yet
        self._lines_lock = threading.Lock()
        self._flush_lock = threading.Lock()

    @property
    def waiting(self) -> int:
        """Lines that are not durable yet."""
        return len(self._lines)

    @property
    def uncovered(self) -> int:
        """Parts that a start would read."""
        return max(0, self._slot - 1 - self._covered)

    @property
    def given_up(self) -> int:
        """Lines that never get into the history, because storage was away for too long."""
        return self._gap

    def begin(self) -> Past:
        """Take the slot after everything that is there, and return that: nothing will come in between.

        Raises Fenced if a higher term was there before.
        """
        with self._flush_lock:
            covering = newest_covering(self._store)
            slot, term = (covering.slot, covering.term) if covering is not None else (0, 0)
            self._covered = slot
            found: list[Part] = []
            while True:
                last = found[-1] if found else Part(slot=slot, term=term, writer="")
                found += parts_after(self._store, last.slot, term=last.term)
                self._slot = max(slots(self._store), default=0) + 1
                if self._create(()) is not None:
                    return Past(covering=covering, parts=found, end=self._slot - 1)

    def append(self, record: dict[str, Any]) -> None:
        line = json.dumps(record, separators=(",", ":"))
        with self._lines_lock:
            self._lines.append(line)
            self._bytes += len(line)

    def keep(self, said: dict[str, Any]) -> None:
        """Keep the state that everything appended so far leads to, once that is durable."""
        with self._lines_lock:
            if self._bytes > self._limit:
                self._gap += len(self._lines)
                self._gap_open = True
                self._drop(len(self._lines))
            self._kept = (self._first + len(self._lines), said)

    def flush(self) -> None:
        """Make every appended line durable. After a StorageError nothing is lost: call it again.

        Fenced if a higher term began: then nothing more is written, by this call or a later one.
        """
        with self._flush_lock:
            with self._lines_lock:
                end, kept = self._first + len(self._lines), self._kept
            if kept is not None:
                self._write(kept[0])
                self._cover(kept[1])
                with self._lines_lock:
                    if self._kept is kept:
                        self._kept = None
            self._write(end)

    def _write(self, end: int) -> None:
        """Make the lines before a number durable."""
        while True:
            with self._lines_lock:
                first = self._first
                lines = tuple(self._lines[: max(0, end - first)])
            if not lines:
                return
            durable = self._create(lines)
            with self._lines_lock:  # some may have been given up meanwhile
                self._drop(first + (durable or 0) - self._first)

    def _drop(self, count: int) -> None:
        if count > 0:
            self._bytes -= sum(map(len, self._lines[:count]))
            del self._lines[:count]
            self._first += count

    def _cover(self, said: dict[str, Any]) -> None:
        """Keep a state beside the last slot. Only where lines were given up it can't be left for later."""
        while (
            self._gap_open or not self._slot
        ):  # a slot of its own divides what is before a gap from the rest
            if self._create(()) is not None:
                break
        slot = self._slot - 1
        covering = Covering(slot=slot, term=self._term, said=said)
        try:
            self._store.write(covering_path(slot), encode_covering(covering))
            self._gap_open = False
            self._covered = slot
            self._compact(slot)
        except StorageError as error:
            if self._gap_open:
                raise
            log.warning("the journal's state is kept later: %s", error)

    def _compact(self, slot: int) -> None:
        """Put parts before a covered slot into the history, and older states away. The slot's own part stays:
        an ousted writer has to find it.
        """
        there = [number for number in slots(self._store) if number < slot]
        done = max((last for _, last in spans(self._store)), default=0)
        new = [number for number in there if number > done]
        if new and new == list(range(done + 1, slot)):
            write_history(self._store, done + 1, slot - 1, list(in_force(read_parts(self._store, new))))
        elif new:
            log.warning(
                "slots %d to %d of the journal are not all there: they stay as they are", done + 1, slot
            )
            return
        self._store.delete([part_path(number) for number in there])
        self._store.delete([covering_path(number) for number in coverings(self._store)[:-STATES]])

    def _create(self, lines: tuple[str, ...]) -> int | None:
        """Try to take the next slot: how many lines are in it, None if it is another's."""
        self._check()
        if not self._slot:
            self._slot = max(slots(self._store), default=1)
        part = Part(slot=self._slot, term=self._term, writer=self._writer, lines=lines)
        try:
            self._store.create(part.name, encode(part))
        except AlreadyExists:
            # An earlier try may have got through although its answer did not; more lines came since.
            part = read_part(self._store, self._slot, taken=True)
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
