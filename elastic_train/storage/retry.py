"""Retry storage operations: how long, with which pauses, and with which error at the end.

Trouble is given time, not a number of tries: six tries may be over in three seconds, and a service that sheds
load, or credentials that are renewed outside, need longer. Delays grow by a factor with full jitter (Brooker,
"Exponential Backoff And Jitter", 2015). A refusal is worth one new connection, because a connection keeps the
credentials it was made with; and from a store that served before it is trouble like any other.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from elastic_train.errors import AlreadyExists, StorageError, StorageNotFound, StorageUnavailable
from elastic_train.storage.failures import Kind, kind_of, of_the_storage

T = TypeVar("T")
log = logging.getLogger(__name__)
SAID_S = 3.0
"""From when on a wait is logged, for people who look on: commands print it, runs tell trouble themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """For `total_s` seconds; the n-th wait is up to `first_s * factor**n`, at most `cap_s`. `attempts` bounds
    the tries too, where somebody waits who wants to hear soon.
    """

    attempts: int = 10_000
    first_s: float = 0.1
    factor: float = 2.0
    cap_s: float = 5.0
    total_s: float = 60.0

    def delay_s(self, tries: int, jitter: float) -> float:
        """The wait after `tries` failed tries; `jitter` in 0 .. 1."""
        growth = self.factor ** min(tries - 1, 64)
        return min(self.cap_s, self.first_s * growth) * (0.5 + 0.5 * jitter)


class Retry:
    """Runs operations under one back-off and counts what it took: `retries` and `renewals`."""

    def __init__(
        self,
        backoff: Backoff | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.backoff = backoff or Backoff()
        self.retries = 0
        self.renewals = 0
        self._served = False  # some operation worked: the address and the credentials are right
        self._clock, self._sleep, self._jitter = clock, sleep, jitter
        self._count = threading.Lock()

    def run(
        self, operation: Callable[[], T], *, what: str, path: str, renew: Callable[[], None] | None = None
    ) -> T:
        """What the operation returns, or StorageNotFound, AlreadyExists, StorageUnavailable for trouble that
        lasted, and StorageError for what no time will mend.
        """
        started, tries, refused, said = self._clock(), 0, False, False
        while True:
            try:
                if refused and renew is not None:
                    with self._count:
                        self.renewals += 1
                    renew()
                done = operation()
                self._served |= renew is not None
                return done
            except Exception as error:
                if not of_the_storage(error):
                    raise
                kind = kind_of(error)
                if kind == "missing":
                    raise StorageNotFound(path=path, operation=what, problem="nothing is there.") from error
                if kind == "exists":
                    raise AlreadyExists(path=path, operation=what, problem="the name is taken.") from error
                first_refusal = kind in ("expired", "denied") and renew is not None and not refused
                refused = kind in ("expired", "denied")
                if first_refusal:
                    continue
                tries += 1
                wait = self.backoff.delay_s(tries, self._jitter())
                spent = self._clock() - started
                problem = f"{type(error).__name__}: {error}" + (
                    f" ({tries} tries in {spent:.1f} s)" if tries > 1 else ""
                )
                if not self._may_pass(kind, renewable=renew is not None):
                    raise StorageError(path=path, operation=what, problem=problem) from error
                if tries >= self.backoff.attempts or spent + wait > self.backoff.total_s:
                    raise StorageUnavailable(path=path, operation=what, problem=problem) from error
                if not said and spent + wait >= SAID_S:
                    said = True
                    left_s = self.backoff.total_s - spent
                    log.info("cannot %s %s: %s; trying for %.0f s more", what, path, problem, left_s)
                with self._count:
                    self.retries += 1
            self._sleep(wait)

    def _may_pass(self, kind: Kind, *, renewable: bool) -> bool:
        """Whether time may mend it. Permissions of a directory are a verdict; credentials that a store
        accepted once are not.
        """
        return kind in ("transient", "expired") or (kind == "denied" and renewable and self._served)


@contextmanager
def failures_named(*, what: str, path: str) -> Iterator[None]:
    """For what can't be tried again half-way: failures of the storage become a StorageError that names the
    path.
    """
    try:
        yield
    except Exception as error:
        if not of_the_storage(error):
            raise
        lasting = kind_of(error) not in ("transient", "expired")
        named = StorageError if lasting else StorageUnavailable
        problem = f"{type(error).__name__}: {error}"
        raise named(path=path, operation=what, problem=problem) from error


@contextmanager
def failures_ignored() -> Iterator[None]:
    """For tidying up after a failure that is being reported already."""
    try:
        yield
    except Exception as error:
        if not of_the_storage(error):
            raise
