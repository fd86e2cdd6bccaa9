"""A URL becomes a store."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec

from elastic_train.errors import ConfigError
from elastic_train.storage.memory_store import Collected
from elastic_train.storage.object_store import ObjectStore
from elastic_train.storage.posix_store import PosixStore
from elastic_train.storage.retry import Retry
from elastic_train.storage.s3_store import S3Store
from elastic_train.storage.store import Buffer, Sink, Store

Options = Mapping[str, Any]

LOCAL = ("file", "local")
WEB = ("http", "https")
FRESH = {"skip_instance_cache": True, "use_listings_cache": False}
DEFAULTS: Mapping[str, Options] = {
    "memory": {},
    "s3": {**FRESH, "max_concurrency": 1},  # more makes each small read two requests
    "s3a": {**FRESH, "max_concurrency": 1},
}


def open_store(url: str, *, options: Options | None = None, retry: Retry | None = None) -> Store:
    """The store at a URL or plain path. Nothing in it is decoded: no query, no escapes.

    `options` go to the fsspec file system (endpoint, credentials); without them its own configuration counts.
    """
    protocol, split, rest = url.partition("://")
    if not split:
        return PosixStore(Path(url), retry=retry)
    if protocol in LOCAL:
        return PosixStore(Path("/" + rest.lstrip("/")), retry=retry)
    if protocol not in fsspec.available_protocols():
        raise ConfigError(
            field="storage_path", problem=f"{url!r} begins with {protocol!r}, which fsspec doesn't know."
        )
    if protocol in WEB:
        raise ConfigError(
            field="storage_path",
            problem=f"{url!r} is an address of the web, which can't be listed or written.",
            remedy="Copy it to a path or an object store first.",
        )
    kind = {"memory": SharedMemoryStore, "s3": S3Store, "s3a": S3Store}.get(protocol, ObjectStore)
    arguments = {**DEFAULTS.get(protocol, FRESH), **(options or {})}
    return kind(
        lambda: fsspec.filesystem(protocol, **arguments),
        root=rest.strip("/"),
        url=url.rstrip("/"),
        retry=retry,
    )


def is_local(url: str) -> bool:
    """Whether a URL is a path of this machine's file system."""
    protocol, split, _ = url.partition("://")
    return not split or protocol in LOCAL


def child_url(url: str, name: str) -> str:
    """The URL of a directory inside another."""
    return f"{url.rstrip('/')}/{name}"


class SharedMemoryStore(ObjectStore):
    """`memory://`: one dictionary for all of this process, whose own create and open files are not atomic."""

    _lock = threading.RLock()

    def create(self, path: str, data: Buffer) -> None:
        with self._lock:
            super().create(path, data)

    def write(self, path: str, data: Buffer) -> None:
        with self._lock:
            super().write(path, data)

    @contextmanager
    def stream(self, path: str) -> Iterator[Sink]:
        sink = Collected()
        yield sink
        self.write(path, bytes(sink.data))
