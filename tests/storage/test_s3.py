"""What only a real S3 server shows: pages of listings, uploads in parts, and credentials that end."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import s3fs

from elastic_train.errors import StorageError, StorageNotFound
from elastic_train.storage import object_store
from elastic_train.storage.fsspec_store import open_store
from elastic_train.storage.retry import Backoff, Retry
from elastic_train.storage.s3_store import S3Store
from elastic_train.storage.s3_upload import Upload
from elastic_train.storage.store import Store
from elastic_train.testing.s3_server import S3Server

pytestmark = pytest.mark.ring1


@pytest.mark.matrix  # a thousand small objects take their time
@pytest.mark.timeout(300)
def test_more_objects_than_a_page_holds_are_listed_and_deleted(s3: S3Server) -> None:
    store = open_store(f"{s3.bucket('paging')}/run", options=s3.options)
    names = [f"journal/{i:05d}" for i in range(1010)]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda name: store.write(name, b"x"), names))
    assert store.list("journal") == names
    store.delete_tree("journal")
    assert store.list() == []


def test_an_upload_in_parts_is_one_object_and_a_given_up_one_is_none(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "BLOCK", 5 << 20)  # the least that S3 takes as a part
    store = open_store(f"{s3.bucket('parts')}/run", options=s3.options)
    data = np.random.default_rng(0).integers(0, 256, 11 << 20, dtype=np.uint8).tobytes()
    with store.stream("whole") as sink:
        for start in range(0, len(data), 3 << 20):
            sink.write(data[start : start + (3 << 20)])
    assert store.read("whole") == data
    assert store.read("whole", (5 << 20) - 7, 14) == data[(5 << 20) - 7 : (5 << 20) + 7]
    with pytest.raises(KeyboardInterrupt):
        interrupted(store, "half", data)
    assert store.list() == ["whole"]
    assert store.unfinished() == []


def interrupted(store: Store, path: str, data: bytes) -> None:
    with store.stream(path) as sink:
        sink.write(data)
        raise KeyboardInterrupt


def test_credentials_that_ended_are_replaced_by_those_of_now(s3: S3Server) -> None:
    secrets = ["that of yesterday", s3.options["secret"]]

    def connect() -> s3fs.S3FileSystem:
        secret = secrets.pop(0)
        return s3fs.S3FileSystem(**{**s3.options, "secret": secret}, skip_instance_cache=True)

    root = s3.bucket("renewed").removeprefix("s3://")
    retry = Retry(Backoff(attempts=2))
    store = S3Store(connect, root=f"{root}/run", url=f"s3://{root}/run", retry=retry)
    store.write("a", b"1")
    assert store.read("a") == b"1"
    assert (retry.renewals, secrets) == (1, [])


def test_a_completion_whose_answer_was_lost_counts_and_a_lost_part_leaves_nothing(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "BLOCK", 5 << 20)
    bucket = s3.bucket("upload").removeprefix("s3://")
    system = s3fs.S3FileSystem(**s3.options, skip_instance_cache=True, use_listings_cache=False)
    store = open_store(f"s3://{bucket}", options=s3.options)
    data = bytes(11 << 20)

    def upload(key: str, fails: str, error: type[StorageError]) -> Upload:
        def call(method: str, **arguments: Any) -> Any:
            answer = system.call_s3(method, Bucket=bucket, Key=key, **arguments)
            if method == fails:
                raise error(path=key, operation="write", problem="the answer was lost.")
            return answer

        return Upload(call, lambda: store.size(key))

    whole = upload("whole", "complete_multipart_upload", StorageNotFound)
    whole.write(data)
    whole.commit()
    assert store.read("whole") == data
    torn = upload("torn", "upload_part", StorageError)
    torn.write(data)
    with pytest.raises(StorageError, match="the answer was lost"):
        torn.commit()
    torn.discard()
    assert store.list() == ["whole"]
    assert store.unfinished() == []


def test_what_was_left_of_an_upload_is_discarded_by_its_name_and_nothing_else(s3: S3Server) -> None:
    root = s3.bucket("left").removeprefix("s3://")
    store = open_store(f"s3://{root}/run", options=s3.options)
    client = s3fs.S3FileSystem(**s3.options, skip_instance_cache=True)
    for name in ("commits/00000003.json", "commits/00000004.json"):
        client.call_s3("create_multipart_upload", Bucket=root, Key=f"run/{name}")
    store.write("commits/00000003.json", b"{}")
    assert store.unfinished("commits") == ["commits/00000003.json", "commits/00000004.json"]
    store.discard(["commits/00000003.json"])
    assert store.unfinished("commits") == ["commits/00000004.json"]
    assert store.read("commits/00000003.json") == b"{}"
