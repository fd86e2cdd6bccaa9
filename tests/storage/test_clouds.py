"""Google's and Azure's storage by their own drivers: trouble is waited for, refusals are told from it."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from elastic_train.errors import StorageError, StorageNotFound, StorageUnavailable
from elastic_train.storage.failures import kind_of, of_the_storage
from elastic_train.storage.fsspec_store import open_store
from elastic_train.storage.retry import Backoff, Retry
from elastic_train.storage.store import Store
from elastic_train.testing.azure_server import KEY, AzureServer
from elastic_train.testing.gcs_server import GCSServer
from elastic_train.testing.troubled_front import Front, Trouble, troubled_front
from tests.storage.test_trouble import DATA, OPERATIONS

pytestmark = pytest.mark.ring1
CLOUDS = ("gcs", "azure")
SOON = Backoff(attempts=2, first_s=0.01, cap_s=0.05)


class Cloud:
    """A server, and a front before it."""

    def __init__(self, server: GCSServer | AzureServer, front: Front) -> None:
        self.server, self.front = server, front
        self.place = (
            server.bucket("trouble") if isinstance(server, GCSServer) else server.container("trouble")
        )

    def options(self, *, key: str = KEY) -> dict[str, Any]:
        options = dict(self.server.options)
        if isinstance(self.server, GCSServer):
            return options | {"endpoint_url": self.front.endpoint}
        said = options["connection_string"].replace(self.server.endpoint, self.front.endpoint)
        return {"connection_string": said.replace(KEY, key)}

    def store(self, backoff: Backoff | None = None, **options: str) -> Store:
        url = f"{self.place}/{uuid.uuid4()}"
        return open_store(url, options=self.options(**options), retry=Retry(backoff))


@pytest.fixture(params=CLOUDS)
def cloud(request: pytest.FixtureRequest) -> Iterator[Cloud]:
    server: GCSServer | AzureServer = request.getfixturevalue(request.param)
    with troubled_front(server.endpoint) as front:
        yield Cloud(server, front)


@pytest.mark.parametrize(
    ("operation", "trouble"),
    [
        ("create", "closed"),
        *(
            pytest.param(*case, marks=pytest.mark.matrix)  # the drivers try again by themselves, unhurriedly
            for case in (("read", "busy"), ("list", "busy"), ("write", "closed"), ("read", "cut"))
        ),
    ],
)
def test_trouble_is_outlasted(cloud: Cloud, operation: str, trouble: Trouble) -> None:
    store = cloud.store()
    store.write("a", DATA)
    cloud.front.give(trouble, 2)
    OPERATIONS[operation](store)
    assert cloud.front.given == 2
    assert store.read("a") == DATA


def test_a_refusal_is_no_trouble(cloud: Cloud) -> None:
    store = cloud.store(SOON)
    cloud.front.give("forbidden", 1_000_000)
    try:
        with pytest.raises(StorageError) as raised:
            store.read("a")
    finally:
        cloud.front.give("forbidden", 0)
    assert not isinstance(raised.value, StorageUnavailable | StorageNotFound)


@pytest.mark.matrix
@pytest.mark.parametrize("operation", ["list", "read"])
def test_a_server_that_is_gone_is_trouble_and_not_an_empty_directory(cloud: Cloud, operation: str) -> None:
    store = cloud.store(Backoff(attempts=1))
    store.write("a", DATA)
    cloud.front.give("closed", 1_000_000)
    try:
        with pytest.raises(StorageUnavailable):
            OPERATIONS[operation](store)
    finally:
        cloud.front.give("closed", 0)
    assert store.list() == ["a"]


def test_a_wrong_key_is_told_at_once(azure: AzureServer) -> None:
    with troubled_front(azure.endpoint) as front:
        store = Cloud(azure, front).store(SOON, key=KEY.replace("E", "F"))
        with pytest.raises(StorageError) as raised:
            store.write("a", DATA)
    assert not isinstance(raised.value, StorageUnavailable)


def test_what_gcsfs_says_in_plain_types_is_the_storages() -> None:
    validate = pytest.importorskip("gcsfs.retry").validate_response
    for status, body, kind in (
        (403, b"", "denied"),
        (400, b'{"error": {"message": "invalid bucket"}}', "final"),
        (412, b"", "exists"),
        (404, b"", "missing"),
        (503, b"", "transient"),
        (502, b"", "transient"),
    ):
        with pytest.raises(Exception) as raised:
            validate(status, body, "b/o")
        assert of_the_storage(raised.value), status
        assert kind_of(raised.value) == kind, status
