"""Trouble of a real server, in every operation: it is waited for, and what lasts has one type."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator

import pytest

from elastic_train.errors import StorageError, StorageUnavailable
from elastic_train.storage.fsspec_store import open_store
from elastic_train.storage.retry import Backoff, Retry
from elastic_train.storage.store import Store
from elastic_train.testing.s3_server import S3Server
from elastic_train.testing.troubled_front import Front, Trouble, troubled_front

pytestmark = pytest.mark.ring1
DATA = bytes(range(256)) * 8


@pytest.fixture(scope="module")
def front(s3: S3Server) -> Iterator[Front]:
    s3.bucket("trouble")
    with troubled_front(s3.endpoint) as served:
        yield served


def behind(front: Front, s3: S3Server, attempts: int = 1000) -> Store:
    once = {"config_kwargs": {"retries": {"max_attempts": 1}}}  # what is tried again is tried by us
    options = {**s3.options, **once}
    options["client_kwargs"] = {**s3.options["client_kwargs"], "endpoint_url": front.endpoint}
    retry = Retry(Backoff(attempts=attempts, first_s=0.01, cap_s=0.05))
    return open_store(f"s3://trouble/{uuid.uuid4()}", options=options, retry=retry)


def stream(store: Store) -> None:
    with store.stream("c") as sink:
        sink.write(DATA)


OPERATIONS: dict[str, Callable[[Store], object]] = {
    "read": lambda store: store.read("a"),
    "read_ranges": lambda store: store.read_ranges("a", [(0, 100), (1000, 500)]),
    "write": lambda store: store.write("b", DATA),
    "create": lambda store: store.create(f"{uuid.uuid4()}", DATA),
    "stream": stream,
    "list": lambda store: store.list(),
    "size": lambda store: store.size("a"),
    "exists": lambda store: store.exists("a"),
    "delete": lambda store: store.delete(["gone"]),
    "delete_tree": lambda store: store.delete_tree("none"),
    "unfinished": lambda store: store.unfinished(),
}


SOME = {("read", "busy", 3), ("create", "expired", 3), ("stream", "closed", 3), ("list", "busy", 3)}
TROUBLE = [
    pytest.param(*case, marks=() if case in SOME else pytest.mark.matrix)
    for case in (
        *((operation, "busy", 3) for operation in OPERATIONS),
        *((operation, "closed", 3) for operation in ("read", "create", "stream", "list")),
        *((operation, "expired", 3) for operation in ("read", "create", "stream", "list", "exists")),
        ("read", "busy", 12),
    )
]


@pytest.mark.parametrize(("operation", "trouble", "times"), TROUBLE)
def test_every_operation_outlasts_trouble(
    operation: str, trouble: Trouble, times: int, front: Front, s3: S3Server
) -> None:
    store = behind(front, s3)
    store.write("a", DATA)
    given = front.given
    front.give(trouble, times)
    OPERATIONS[operation](store)
    assert front.given == given + times
    assert store.read("a") == DATA


@pytest.mark.parametrize("operation", ["read", "read_ranges", "list"])
def test_a_body_that_breaks_off_is_asked_for_again(operation: str, front: Front, s3: S3Server) -> None:
    store = behind(front, s3)
    store.write("a", DATA)
    front.give("cut", 3)
    OPERATIONS[operation](store)
    assert store.read("a") == DATA


def test_what_a_deletion_kept_is_asked_for_again_and_a_refusal_is_named_at_once(
    front: Front, s3: S3Server
) -> None:
    store = behind(front, s3)
    store.write("a", DATA)
    given = front.given
    front.give("kept for now", 3)
    store.delete(["a"])
    assert front.given == given + 3
    assert store.list() == []
    store.write("a", DATA)
    front.give("kept", 1)
    with pytest.raises(
        StorageError, match=r"cannot delete s3://trouble/a/b: AccessDenied.*s3:DeleteObject"
    ) as no:
        store.delete(["a"])
    assert not isinstance(no.value, StorageUnavailable)


LASTING = [
    ("read", "cut"),
    *(
        pytest.param(*case, marks=pytest.mark.matrix)
        for case in (
            ("read", "busy"),
            ("write", "expired"),
            ("create", "closed"),
            ("list", "cut"),
            ("exists", "expired"),
        )
    ),
]


@pytest.mark.parametrize(("operation", "trouble"), LASTING)
def test_trouble_that_lasts_has_one_type(
    operation: str, trouble: Trouble, front: Front, s3: S3Server
) -> None:
    store = behind(front, s3, attempts=2)
    store.write("a", DATA)
    front.give(trouble, 1_000_000)
    try:
        with pytest.raises(StorageUnavailable, match=r"2 tries in"):
            OPERATIONS[operation](store)
    finally:
        front.give(trouble, 0)
    assert store.read("a") == DATA
