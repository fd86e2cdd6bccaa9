"""Problems of the storage are found before the first step."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_train.errors import ConfigError, StorageError
from elastic_train.storage.fsspec_store import child_url, open_store
from elastic_train.storage.memory_store import MemoryStore
from elastic_train.storage.preflight import probe, see
from elastic_train.storage.retry import Backoff, Retry
from elastic_train.storage.store import Buffer
from elastic_train.testing.s3_server import S3Server

pytestmark = pytest.mark.ring1


def test_a_good_store_passes_and_the_token_is_seen_by_others(tmp_path: Path) -> None:
    token = probe(open_store(str(tmp_path)), needed_bytes=10)
    see(open_store(str(tmp_path)), token)


def test_a_path_that_nodes_do_not_share_is_found(tmp_path: Path) -> None:
    token = probe(open_store(str(tmp_path / "node a")))
    with pytest.raises(StorageError, match="all nodes share"):
        see(open_store(str(tmp_path / "node b")), token)


def test_too_little_space_is_named_in_bytes(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=rf"{1 << 60} bytes are needed"):
        probe(open_store(str(tmp_path)), needed_bytes=1 << 60)


def test_an_unwritable_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    with pytest.raises(StorageError, match=r"cannot create .*file/run/preflight"):
        probe(open_store(str(tmp_path / "file/run")))


def test_a_store_that_overwrites_on_create_is_refused() -> None:
    class Careless(MemoryStore):
        def create(self, path: str, data: Buffer) -> None:
            self.write(path, data)

    with pytest.raises(StorageError, match="conditional"):
        probe(Careless())


@pytest.mark.parametrize("url", ["hf://me/model/runs", "webhdfs://namenode:9870/runs"])
def test_a_driver_that_looks_before_it_writes_is_refused(url: str) -> None:
    """Before it is asked for anything: what looks and then writes passes when nobody else writes."""
    pytest.importorskip("huggingface_hub", reason="the driver of hf://")
    with pytest.raises(StorageError, match=rf"cannot commit to {url}: .* could both commit"):
        probe(open_store(url))


def test_hadoop_that_is_not_installed_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    monkeypatch.setenv("HADOOP_HOME", "/nowhere")
    with pytest.raises(ConfigError, match="Hadoop's own library"):
        open_store("hdfs://namenode:8020/runs")


def test_wrong_credentials_fail_fast(s3: S3Server) -> None:
    options = {**s3.options, "secret": "wrong"}
    store = open_store(f"{s3.bucket('preflight')}/run", options=options, retry=Retry(Backoff(attempts=2)))
    with pytest.raises(StorageError, match="s3://preflight/run"):
        probe(store)


def test_an_unknown_protocol_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="nosuch"):
        open_store("nosuch://bucket/run")
    with pytest.raises(ConfigError, match="address of the web"):
        open_store("https://there/run")


def test_a_file_url_and_its_path_are_the_same_place(tmp_path: Path) -> None:
    open_store(child_url(f"file://{tmp_path}/", "a b#1")).write("x", b"1")
    assert open_store(str(tmp_path / "a b#1")).read("x") == b"1"


def test_a_killed_upload_is_seen_and_collected(s3: S3Server) -> None:
    url = f"{s3.bucket('killed')}/run"
    program = (
        "import os, sys, json; from elastic_train.storage.fsspec_store import open_store\n"
        "with open_store(sys.argv[1], options=json.loads(sys.argv[2])).stream('d/a') as sink:\n"
        "    sink.write(bytes(17 << 20)); os.kill(os.getpid(), 9)"
    )

    subprocess.run([sys.executable, "-c", program, url, json.dumps(s3.options)], check=False)
    store = open_store(url, options=s3.options)
    assert store.list() == []
    assert store.unfinished() == store.unfinished("d") == ["d/a"]
    store.delete_tree("d")
    assert store.unfinished() == []
