"""The lease: who is at work on a run, so that a second controller is refused politely.

It is advice. No clock of another machine is believed: a candidate watches the lease over the lease time by
its own clock, and takes it if it did not change. That two may believe they hold it at once is harmless,
because the fence in the commit log is what decides.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from elastic_train.errors import Fenced, LeaseHeld, StorageError, StorageNotFound
from elastic_train.storage.store import Store

PATH = "lease.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenure:
    """What the lease says. `holder` is unique to one controller process; `renewals` counts its signs of
    life.
    """

    holder: str
    term: int = 0
    renewals: int = 0
    released: bool = False


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
        self._mine = Tenure(holder=holder)

    def acquire(self) -> None:
        """Take the lease: at once if it is free, after the lease time if its holder is silent, else
        LeaseHeld.
        """
        seen, since = self.look(), self._clock()
        while seen is not None and not seen.released and seen.holder != self._mine.holder:
            if self._clock() - since >= self._lease_s:
                break
            self._sleep(self._lease_s / 8)
            now = self.look()
            if now is not None and not now.released and now != seen:
                raise LeaseHeld(run=self._store.url, holder=now.holder, age_s=0.0)
            seen = now
        self._put(self._mine)

    def renew(self, term: int) -> None:
        """Show life. Fenced if somebody else took the lease meanwhile."""
        seen = self.look()
        if seen is not None and seen.holder != self._mine.holder:
            raise Fenced(run=self._store.url, term=term, by_term=max(seen.term, term + 1))
        self._put(replace(self._mine, term=term, renewals=self._mine.renewals + 1))

    def release(self) -> None:
        """Give the lease up, so that the next controller needn't wait; nothing if it is another's by now."""
        seen = self.look()
        if seen is not None and seen.holder == self._mine.holder:
            self._put(replace(self._mine, renewals=self._mine.renewals + 1, released=True))

    def look(self) -> Tenure | None:
        """What the lease says now; None if there never was one."""
        try:
            data = self._store.read(PATH)
        except StorageNotFound:
            return None
        try:
            value: dict[str, Any] = json.loads(data)
            return Tenure(**value)
        except (ValueError, TypeError) as error:
            raise StorageError(
                path=f"{self._store.url}/{PATH}",
                operation="understand",
                problem=f"{error}. If no controller of this run is alive, delete the file.",
            ) from error

    def _put(self, tenure: Tenure) -> None:
        self._store.write(PATH, json.dumps(asdict(tenure), sort_keys=True).encode())
        self._mine = tenure
