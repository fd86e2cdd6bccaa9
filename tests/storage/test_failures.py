"""What each driver's errors mean, those of drivers that are not installed here included."""

from __future__ import annotations

import errno
import json
import os
import socket
import ssl
from collections.abc import Callable
from http.client import IncompleteRead
from pathlib import Path

import aiohttp
import pytest
from botocore.exceptions import (
    ClientError,
    ConnectTimeoutError,
    NoCredentialsError,
    NoRegionError,
    ParamValidationError,
    ReadTimeoutError,
    TokenRetrievalError,
)
from fsspec import AbstractFileSystem
from fsspec.exceptions import FSTimeoutError
from fsspec.implementations.memory import MemoryFileSystem
from s3fs.errors import translate_boto_error

from elastic_train.errors import StorageError, StorageUnavailable
from elastic_train.storage.failures import Kind, kind_of, of_the_storage
from elastic_train.storage.object_store import ObjectStore
from elastic_train.storage.posix_store import PosixStore
from elastic_train.storage.retry import Backoff, Retry, failures_named
from elastic_train.storage.store import Store

pytestmark = pytest.mark.ring1


class HttpError(Exception):
    """As gcsfs raises it."""

    def __init__(self, code: int, message: str = "") -> None:
        super().__init__(message)
        self.code = code


class AzureError(Exception):
    """As azure.core raises it."""

    def __init__(self, status: int | None, message: str = "") -> None:
        super().__init__(message)
        self.status_code = status


class RefreshError(Exception):
    """As google.auth raises it."""


def s3(code: str, status: int) -> BaseException:
    said = {"Error": {"Code": code, "Message": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return translate_boto_error(ClientError(said, "GetObject"))


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (aiohttp.ClientPayloadError("cut"), "transient"),
        (aiohttp.ServerDisconnectedError(), "transient"),
        (aiohttp.ClientOSError(errno.ECONNRESET, "reset"), "transient"),
        (ConnectTimeoutError(endpoint_url="http://s3"), "transient"),
        (ReadTimeoutError(endpoint_url="http://s3"), "transient"),
        (FSTimeoutError(), "transient"),
        (IncompleteRead(b""), "transient"),
        (json.JSONDecodeError("a proxy's page", "<html>", 0), "final"),
        (ssl.SSLError("decryption failed"), "transient"),
        (ssl.SSLCertVerificationError("self-signed"), "denied"),
        (socket.gaierror(socket.EAI_AGAIN, "try again"), "transient"),
        (OSError(errno.ESTALE, "Stale file handle"), "transient"),
        (OSError(errno.EHOSTDOWN, "Host is down"), "transient"),
        (OSError(errno.EKEYEXPIRED, "Key has expired"), "expired"),
        (OSError(errno.ENOSPC, "No space left on device"), "final"),
        (OSError(errno.EROFS, "Read-only file system"), "final"),
        (s3("SlowDown", 503), "transient"),
        (s3("InternalError", 500), "transient"),
        (s3("RequestTimeout", 400), "transient"),
        (s3("ConditionalRequestConflict", 409), "transient"),
        (s3("ExpiredToken", 400), "expired"),
        (s3("RequestTimeTooSkewed", 403), "expired"),
        (s3("400", 400), "denied"),
        (s3("403", 403), "denied"),
        (s3("AccessDenied", 403), "denied"),
        (s3("NoSuchKey", 404), "missing"),
        (s3("NoSuchBucket", 404), "missing"),
        (s3("InvalidRange", 416), "final"),
        (s3("EntityTooLarge", 400), "final"),
        (TokenRetrievalError(provider="sso", error_msg="no answer"), "expired"),
        (NoCredentialsError(), "denied"),
        (NoRegionError(), "final"),
        (ParamValidationError(report="bad"), "final"),
        (HttpError(503), "transient"),
        (HttpError(429), "transient"),
        (HttpError(401), "denied"),
        (HttpError(401, "token expired"), "expired"),
        (HttpError(404), "missing"),
        (AzureError(None, "the connection was closed"), "transient"),
        (AzureError(500), "transient"),
        (AzureError(403), "denied"),
        (RefreshError("no answer of the metadata service"), "expired"),
        (NotImplementedError(), "final"),
        (RuntimeError("Session is closed"), "expired"),
        (RuntimeError("cannot schedule new futures after interpreter shutdown"), "final"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_an_error_means_what_its_system_says(error: BaseException, kind: Kind) -> None:
    assert of_the_storage(error)
    assert kind_of(error) == kind


@pytest.mark.parametrize(
    "error",
    [TypeError(), ValueError(), KeyError("a"), AssertionError(), ZeroDivisionError(), RecursionError()],
)
def test_faults_of_the_program_are_none_of_the_storage(error: Exception) -> None:
    assert not of_the_storage(error)
    with pytest.raises(type(error)), failures_named(what="write", path="a"):
        raise error


class Broken(MemoryFileSystem):
    """Every call of the system fails in the same way."""

    cachable = False

    def __init__(self, error: Exception) -> None:
        super().__init__(global_store=False)
        self.error = error

    def fail(self, *args: object, **kwargs: object) -> None:
        raise self.error

    find = AbstractFileSystem.find  # by walking, as most systems do
    pipe_file = cat_file = ls = info = rm_file = _open = fail


CALLS: dict[str, Callable[[Store], object]] = {
    "read": lambda store: store.read("a"),
    "write": lambda store: store.write("a", b"x"),
    "create": lambda store: store.create("a", b"x"),
    "stream": lambda store: store.stream("a").__enter__(),
    "list": lambda store: store.list(),
    "size": lambda store: store.size("a"),
    "exists": lambda store: store.exists("a"),
    "delete": lambda store: store.delete(["a"]),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    "error",
    [aiohttp.ClientPayloadError("cut"), HttpError(503), AzureError(None), s3("ExpiredToken", 400)],
    ids=["aiohttp", "gcsfs", "azure", "expired"],
)
def test_trouble_is_of_one_type_in_every_operation(call: str, error: Exception) -> None:
    retry = Retry(Backoff(total_s=1.0), clock=iter(range(100)).__next__, sleep=lambda s: None)
    store = ObjectStore(lambda: Broken(error), root="run", url="x://run", retry=retry)
    with pytest.raises(StorageUnavailable):
        CALLS[call](store)


def test_a_refusal_is_trouble_where_the_store_served_before_and_else_a_verdict() -> None:
    system = MemoryFileSystem(global_store=False, skip_instance_cache=True)
    broken = Broken(s3("AccessDenied", 403))
    made = [broken, system, *[broken] * 99]
    retry = Retry(Backoff(total_s=5.0), clock=iter(range(100)).__next__, sleep=lambda s: None)
    store = ObjectStore(lambda: made.pop(0), root="run", url="x://run", retry=retry)
    store.write("a", b"x")  # after one renewal
    store._fs = broken
    with pytest.raises(StorageUnavailable):
        store.write("a", b"x")
    fresh = ObjectStore(lambda: broken, root="run", url="x://run", retry=Retry())
    with pytest.raises(StorageError) as raised:
        fresh.write("a", b"x")
    assert not isinstance(raised.value, StorageUnavailable)


@pytest.mark.parametrize("call", ["read", "write", "create", "list", "size", "exists", "delete"])
def test_a_stale_handle_of_a_network_file_system_is_trouble(
    call: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    retry = Retry(Backoff(total_s=1.0), clock=iter(range(100)).__next__, sleep=lambda s: None)
    store = PosixStore(tmp_path, retry=retry)

    def stale(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    for name in ("open", "scandir", "unlink", "stat"):
        monkeypatch.setattr(os, name, stale)
    with pytest.raises(StorageUnavailable, match="Stale"):
        CALLS[call](store)
