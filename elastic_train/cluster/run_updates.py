"""Updates from the controller to its drivers: records, and how the run ended."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from elastic_train.cluster.messages import Heartbeat
from elastic_train.control.commands import End
from elastic_train.errors import ElasticTrainError
from elastic_train.observe.journal_records import Record

KEEP_RECORDS = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Driven:
    """Who drives the run, and for how long it has said nothing."""

    driver: str
    silent_s: float
    ended: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RunUpdate:
    """What a driver shows: the records since it last asked, who is where, and how it ended if it did."""

    term: int
    next: int  # ask from this number on, in this term
    records: tuple[Record, ...]
    heartbeats: tuple[Heartbeat, ...]
    ended: End | None
    error: ElasticTrainError | None


class Board:
    """Safe from any thread. Old records are dropped: those who come late read the journal."""

    def __init__(self) -> None:
        self.ended: End | None = None
        self._error: ElasticTrainError | None = None
        self._records: list[Record] = []
        self._first = 0  # the number of the oldest record
        self._news = threading.Condition()

    def put(self, make: Callable[[int], Record]) -> Record:
        """Make the record of the next number and show it."""
        with self._news:
            noted = make(self._first + len(self._records))
            self._records.append(noted)
            if len(self._records) > KEEP_RECORDS:
                del self._records[: KEEP_RECORDS // 2]
                self._first += KEEP_RECORDS // 2
            self._news.notify_all()
        return noted

    def end(self, end: End, error: ElasticTrainError | None) -> None:
        with self._news:
            self.ended, self._error = end, error
            self._news.notify_all()

    def since(self, term: int, number: int, wait_s: float, heartbeats: tuple[Heartbeat, ...]) -> RunUpdate:
        """The records from a number on; waits for news."""
        with self._news:
            self._news.wait_for(
                lambda: self._first + len(self._records) > number or self.ended is not None, wait_s
            )
            return RunUpdate(
                term=term,
                next=self._first + len(self._records),
                records=tuple(self._records[max(0, number - self._first) :]),
                heartbeats=heartbeats,
                ended=self.ended,
                error=self._error,
            )
