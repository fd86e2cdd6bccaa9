"""Lease of a run: names the controller at work, so that a second one is refused.

It is advice. No clock of another machine is believed: a candidate watches the lease over its length, which it
carries, by its own clock, and takes it if it did not change. A write of the lease may arrive after its writer
was succeeded, so what it says ends nobody of whom the commit log knows: the newest fence there is the proof,
and its holder puts the lease right.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from elastic_train.errors import Fenced, LeaseHeld, StorageError, StorageNotFound
from elastic_train.storage.commit_log import CommitLog
from elastic_train.storage.store import Store

PATH = "lease.json"
TURNS = 8
"""How often a lease is looked at within its length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenure:
    """What the lease says. `holder` is unique to one controller process; `renewals` counts its signs of
    life, of which there are several in `lease_s`; `turn` counts those who took it, one after the other.
    """

    holder: str
    term: int = 0
    renewals: int = 0
    released: bool = False
    lease_s: float = 0.0  # 0: as its candidate has it
    turn: int = 0


class Lease:
    """One candidate's hand on the lease of the run whose directory is the root of `store`."""

    def __init__(
        self,
        store: Store,
        *,
        holder: str,
        lease_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._store, self._lease_s = store, lease_s
        self._clock, self._sleep = clock, sleep
        self._mine = Tenure(holder=holder, lease_s=lease_s)

    def acquire(self) -> None:
        """Take the lease: at once if it is free, after its length if its holder is silent, else LeaseHeld."""
        seen, since = self.look(), self._clock()
        while seen is not None and not seen.released and seen.holder != self._mine.holder:
            length_s = seen.lease_s or self._lease_s
            if self._clock() - since >= length_s:
                break
            self._sleep(length_s / TURNS)
            now = self.look()
            if now is not None and not now.released and now != seen:
                raise LeaseHeld(run=self._store.url, holder=now.holder, age_s=0.0)
            seen = now
        self._put(replace(self._mine, turn=seen.turn + 1 if seen is not None else 1))

    def renew(self, term: int) -> None:
        """Show life. Fenced if a higher term began, or if another took the lease of a term that never did."""
        seen = self.look()
        if seen is not None and seen.holder != self._mine.holder:
            newest = CommitLog(self._store).newest_term()
            if newest > term or (newest < term and not self._is_late(seen)):
                raise Fenced(run=self._store.url, term=term, by_term=max(newest, seen.term, term + 1))
        self._put(replace(self._mine, term=term, renewals=self._mine.renewals + 1))

    def release(self) -> None:
        """Give the lease up, so that the next controller needn't wait; nothing if it is another's by now."""
        seen = self.look()
        if seen is not None and (seen.holder == self._mine.holder or self._is_late(seen)):
            self._put(replace(self._mine, renewals=self._mine.renewals + 1, released=True))

    def look(self) -> Tenure | None:
        """What the lease says now; None if there never was one."""
        try:
            data = self._store.read(PATH)
        except StorageNotFound:
            return None
        try:
            value: dict[str, Any] = json.loads(data)
            known = {f.name for f in fields(Tenure)}
            seen = Tenure(**{name: said for name, said in value.items() if name in known})
            return replace(seen, term=int(seen.term), turn=int(seen.turn), lease_s=float(seen.lease_s))
        except (ValueError, TypeError, AttributeError) as error:
            raise StorageError(
                path=f"{self._store.url}/{PATH}",
                operation="understand",
                problem=f"{error}. If no controller of this run is alive, delete the file.",
            ) from error

    def _is_late(self, seen: Tenure) -> bool:
        """Whether another's word was written before this holder took the lease, and arrived after."""
        return seen.turn < self._mine.turn

    def _put(self, tenure: Tenure) -> None:
        self._store.write(PATH, json.dumps(asdict(tenure), sort_keys=True).encode())
        self._mine = tenure
