"""Trying again: which failures may pass, how long to wait, when to give up.

Delays grow by a factor with full jitter (Brooker, "Exponential Backoff And Jitter", 2015), bounded in number
and in total time. An authentication failure is worth one new connection, because credentials are renewed
outside.
"""

from __future__ import annotations

import errno
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeVar

from botocore.exceptions import BotoCoreError, ClientError
from botocore.parsers import ResponseParserError

from elastic_train.errors import AlreadyExists, StorageError, StorageNotFound

T = TypeVar("T")

FAILURES = (OSError, BotoCoreError, ClientError, ResponseParserError)
"""What a store's file system raises for reasons outside this program."""

TRANSIENT_CODES = frozenset(
    {
        errno.EAGAIN,
        errno.EBUSY,  # s3fs: SlowDown, ServiceUnavailable, 409
        errno.ECONNABORTED,
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.EHOSTUNREACH,
        errno.EINTR,
        errno.EIO,  # s3fs: any code it has no name for, ConditionalRequestConflict among them
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.EPIPE,
        errno.EREMOTEIO,  # s3fs: InternalError
        errno.ESTALE,
        errno.ETIMEDOUT,
    }
)
TRANSIENT_TYPES = (ConnectionError, TimeoutError, BotoCoreError, ResponseParserError)

Kind = Literal["missing", "exists", "auth", "transient", "final"]


def kind_of(error: BaseException) -> Kind:
    """What a failure means for another try."""
    if isinstance(error, FileNotFoundError):
        return "missing"
    if isinstance(error, FileExistsError):
        return "exists"
    if isinstance(error, PermissionError) or type(error).__name__ == "NoCredentialsError":
        return "auth"
    if isinstance(error, TRANSIENT_TYPES):
        return "transient"
    if isinstance(error, OSError) and error.errno in TRANSIENT_CODES:
        return "transient"
    return "final"


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """At most `attempts` tries within `total_s`; the n-th wait is up to `first_s * factor**n`, at most
    `cap_s`.
    """

    attempts: int = 6
    first_s: float = 0.1
    factor: float = 2.0
    cap_s: float = 5.0
    total_s: float = 60.0

    def delay_s(self, tries: int, jitter: float) -> float:
        """The wait after `tries` failed tries; `jitter` in 0 .. 1."""
        return min(self.cap_s, self.first_s * self.factor ** (tries - 1)) * (0.5 + 0.5 * jitter)


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
        self._clock, self._sleep, self._jitter = clock, sleep, jitter
        self._count = threading.Lock()

    def run(
        self, operation: Callable[[], T], *, what: str, path: str, renew: Callable[[], None] | None = None
    ) -> T:
        started, tries = self._clock(), 0
        while True:
            try:
                return operation()
            except FAILURES as error:
                kind = kind_of(error)
                if kind == "missing":
                    raise StorageNotFound(path=path, operation=what, problem="nothing is there.") from error
                if kind == "exists":
                    raise AlreadyExists(path=path, operation=what, problem="the name is taken.") from error
                if kind == "auth" and renew is not None:
                    with self._count:
                        self.renewals += 1
                    renew()
                    renew = None
                    continue
                tries += 1
                wait = self.backoff.delay_s(tries, self._jitter())
                spent = self._clock() - started
                if (
                    kind != "transient"
                    or tries >= self.backoff.attempts
                    or spent + wait > self.backoff.total_s
                ):
                    text = f"{type(error).__name__}: {error}"
                    tried = f" ({tries} tries in {spent:.1f} s)" if tries > 1 else ""
                    raise StorageError(path=path, operation=what, problem=text + tried) from error
                with self._count:
                    self.retries += 1
            self._sleep(wait)


@contextmanager
def failures_named(*, what: str, path: str) -> Iterator[None]:
    """For what can't be tried again half-way: failures of the system become a StorageError that names the
    path.
    """
    try:
        yield
    except FAILURES as error:
        problem = f"{type(error).__name__}: {error}"
        raise StorageError(path=path, operation=what, problem=problem) from error
