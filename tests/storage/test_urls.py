"""What URLs and paths name, and that what names nothing is refused before a directory is made of it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from elastic_train.errors import ConfigError
from elastic_train.storage.fsspec_store import is_local, open_store
from elastic_train.storage.urls import parse

pytestmark = pytest.mark.ring1


def test_a_path_is_a_path_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for url, path in (
        ("/data/a b", "/data/a b"),
        ("runs/x", f"{tmp_path}/runs/x"),
        ("~/runs", f"{tmp_path}/runs"),
        ("~", f"{tmp_path}"),
        ("file:///data/x", "/data/x"),
        ("FILE:///data/x", "/data/x"),
        ("local:///data/x", "/data/x"),
        ("file://localhost/data/x", "/data/x"),
        ("file://~/runs", f"{tmp_path}/runs"),
        ("./s3:/x", f"{tmp_path}/s3:/x"),
        ("run 12:30/x", f"{tmp_path}/run 12:30/x"),
    ):
        assert is_local(url)
        assert open_store(url).url == path


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("s3:/bucket/runs", "s3:// is"),
        ("s3:bucket/runs", "s3:// is"),
        ("S3:/bucket/runs", "s3:// is"),
        ("s3//bucket/runs", "s3:// is"),
        ("gs:/bucket", "gs:// is"),
        ("file:/data", "file:// is"),
        ("s4://bucket/runs", "doesn't know"),
        ("s33:/bucket", "doesn't know"),
        ("simplecache::s3://bucket/x", "is no URL"),
        ("file://data/runs", "file:///data/runs"),
        ("~nobody-of-that-name/runs", "home directory of nobody"),
        ("s3://", "names no bucket"),
        ("s3:///runs", "names no bucket"),
        ("https://host/x", "of the web"),
        ("sftp:///runs", "names no host"),
        ("sftp://box:ssh/runs", "no number"),
        ("zip://a", "no place"),
        ("data://a", "no place"),
    ],
)
def test_what_is_no_place_for_a_run_is_refused_by_name(url: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as raised:
        open_store(url)
    assert raised.value.field == "storage_path"


def test_a_password_is_refused_and_not_repeated() -> None:
    with pytest.raises(ConfigError, match="password") as raised:
        open_store("sftp://me:secret@box/runs")
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    ("url", "root", "options"),
    [
        ("hdfs://namenode:8020/runs", "/runs", {"host": "namenode", "port": 8020}),
        ("hdfs://me@namenode/runs/a", "/runs/a", {"host": "namenode", "user": "me"}),
        ("hdfs:///runs", "/runs", {}),
        ("sftp://me@box:22/home/me/runs", "/home/me/runs", {"host": "box", "port": 22, "username": "me"}),
        ("smb://box/share/runs", "/share/runs", {"host": "box"}),
        ("abfs://c@acct.dfs.core.windows.net/runs", "c/runs", {"account_name": "acct"}),
        (
            "abfss://c@acct.dfs.core.chinacloudapi.cn/runs",
            "c/runs",
            {"account_name": "acct", "account_host": "acct.dfs.core.chinacloudapi.cn"},
        ),
        ("az://c/runs/", "c/runs", {}),
        ("s3://bucket/a%20b?c#d", "bucket/a%20b?c#d", {}),
    ],
)
def test_the_host_of_a_url_is_the_host_that_is_asked(url: str, root: str, options: dict[str, object]) -> None:
    address = parse(url)
    assert (address.root, dict(address.options)) == (root, options)
    assert not is_local(url)


def test_what_the_url_says_reaches_the_driver_and_options_win(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []

    def system(protocol: str, **arguments: Any) -> MemoryFileSystem:
        seen.append(arguments)
        return MemoryFileSystem(global_store=False, skip_instance_cache=True)

    monkeypatch.setattr(fsspec, "filesystem", system)
    store = open_store("sftp://me@box/home/me/runs", options={"username": "you"})
    assert (seen[0]["host"], seen[0]["username"]) == ("box", "you")
    store.write("a/b", b"x")
    assert store.list("a") == ["a/b"]
    assert store.url == "sftp://me@box/home/me/runs"


@pytest.mark.parametrize(
    ("url", "package"),
    [
        ("abfss://c@a.dfs.core.windows.net/runs", "adlfs"),
        ("gs://bucket/runs", "gcsfs"),
        ("abfs://c/runs", "adlfs"),
        ("sftp://box/runs", "paramiko"),
    ],
)
def test_a_missing_driver_is_named_with_its_package(
    url: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # as where it is not installed
    loaded = vars(sys.modules["fsspec.registry"])["_registry"]
    monkeypatch.delitem(loaded, url.partition(":")[0].replace("abfss", "abfs"), raising=False)
    with pytest.raises(ConfigError, match=rf"pip install {package}"):
        open_store(url)
