"""Which failures are tried again, for how long, and what comes out."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest
from botocore.exceptions import EndpointConnectionError
from fsspec.implementations.memory import MemoryFileSystem

from elastic_train.errors import AlreadyExists, StorageError, StorageNotFound
from elastic_train.storage.object_store import ObjectStore
from elastic_train.storage.retry import Backoff, Retry

pytestmark = pytest.mark.ring1


class Clock:
    """Virtual time: sleeping is free and remembered."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def retry_on(clock: Clock, **backoff: float) -> Retry:
    return Retry(Backoff(**backoff), clock=lambda: clock.now, sleep=clock.sleep, jitter=lambda: 1.0)


def failing(times: int, error: Exception) -> Callable[[], str]:
    left = [times]

    def operation() -> str:
        if left[0]:
            left[0] -= 1
            raise error
        return "done"

    return operation


@pytest.mark.parametrize(
    "error",
    [
        ConnectionResetError("reset"),
        TimeoutError("slow"),
        OSError(errno.EBUSY, "SlowDown"),
        OSError(errno.EIO, "ConditionalRequestConflict"),
        EndpointConnectionError(endpoint_url="http://s3"),
    ],
)
def test_what_may_pass_is_tried_again_with_growing_waits(error: Exception) -> None:
    clock = Clock()
    retry = retry_on(clock, first_s=1.0, cap_s=3.0)
    assert retry.run(failing(3, error), what="read", path="a") == "done"
    assert clock.slept == [1.0, 2.0, 3.0]
    assert retry.retries == 3


def test_it_gives_up_after_its_tries_and_says_so() -> None:
    clock = Clock()
    with pytest.raises(StorageError, match=r"cannot read a: .*reset.*4 tries"):
        retry_on(clock, attempts=4).run(failing(99, ConnectionResetError("reset")), what="read", path="a")
    assert len(clock.slept) == 3


def test_a_wait_of_more_than_a_moment_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    with caplog.at_level("INFO", "elastic_train.storage.retry"):
        retry_on(clock).run(failing(3, TimeoutError("slow")), what="read", path="s3://b/x")
        assert not caplog.records
        retry_on(clock).run(failing(9, TimeoutError("slow")), what="read", path="s3://b/x")
    (said,) = [r.getMessage() for r in caplog.records]
    assert said.startswith("cannot read s3://b/x: TimeoutError: slow (")
    assert said.endswith(" s more")


def test_it_gives_up_after_its_time() -> None:
    clock = Clock()
    with pytest.raises(StorageError):
        retry_on(clock, attempts=99, first_s=1.0, cap_s=10.0, total_s=20.0).run(
            failing(99, TimeoutError()), what="read", path="a"
        )
    assert clock.now <= 20.0


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), StorageError),
        (FileNotFoundError("a"), StorageNotFound),
        (FileExistsError("a"), AlreadyExists),
        (PermissionError("denied"), StorageError),
    ],
)
def test_what_will_not_pass_is_raised_at_once(error: Exception, raised: type[StorageError]) -> None:
    clock = Clock()
    with pytest.raises(StorageError) as caught:
        retry_on(clock).run(failing(1, error), what="read", path="a")
    assert type(caught.value) is raised
    assert clock.slept == []


def test_errors_of_the_program_pass_through() -> None:
    with pytest.raises(ZeroDivisionError):
        retry_on(Clock()).run(failing(1, ZeroDivisionError()), what="read", path="a")


class Flaky(MemoryFileSystem):
    """Every operation fails twice with a reset before it works."""

    cachable = False

    def __init__(self) -> None:
        super().__init__(global_store=False)
        self.failures: dict[str, int] = {}

    def fail(self, operation: str) -> None:
        self.failures[operation] = self.failures.get(operation, 0) + 1
        if self.failures[operation] <= 2:
            raise ConnectionResetError(operation)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: object) -> None:
        self.fail(mode)
        super().pipe_file(path, value, mode)

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **kwargs: object
    ) -> bytes:
        self.fail("read")
        return super().cat_file(path, start, end)


def test_a_store_rides_out_two_failures_of_each_operation() -> None:
    flaky, clock = Flaky(), Clock()
    store = ObjectStore(lambda: flaky, root="/run", url="flaky://run", retry=retry_on(clock))
    store.write("a", b"one")
    store.create("b", b"two")
    assert (store.read("a"), store.read("b")) == (b"one", b"two")
    assert store.retry.retries == 6


class Expiring(MemoryFileSystem):
    """A token that is good for three calls and renewed only by connecting again. Shares one dictionary."""

    cachable = False
    made = 0

    def __init__(self, objects: dict[str, object]) -> None:
        super().__init__(global_store=False)
        self.store = objects
        self.calls = 0

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: object) -> None:
        self.calls += 1
        if self.calls > 3:
            raise PermissionError("ExpiredToken")
        super().pipe_file(path, value, mode)


def test_expired_credentials_are_renewed_by_a_new_connection() -> None:
    objects: dict[str, object] = {}
    store = ObjectStore(lambda: Expiring(objects), root="/run", url="x://run", retry=retry_on(Clock()))
    for i in range(10):
        store.write(f"{i}", b"x")
    assert len(store.list()) == 10
    assert (store.retry.renewals, store.retry.retries) == (3, 0)


def test_wrong_credentials_are_no_endless_renewal() -> None:
    class Refusing(Expiring):
        def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: object) -> None:
            raise PermissionError("AccessDenied")

    store = ObjectStore(lambda: Refusing({}), root="/run", url="x://run", retry=retry_on(Clock()))
    with pytest.raises(StorageError, match="AccessDenied"):
        store.write("a", b"x")
    assert store.retry.renewals == 1
