"""Open the store of a URL."""

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
from elastic_train.storage.urls import child_url, is_local, package_of, parse

__all__ = ["Options", "SharedMemoryStore", "child_url", "file_system", "is_local", "open_store"]
Options = Mapping[str, Any]

FRESH = {"skip_instance_cache": True, "use_listings_cache": False}
DEFAULTS: Mapping[str, Options] = {
    "memory": {},
    "s3": {**FRESH, "max_concurrency": 1},  # more makes each small read two requests
    "s3a": {**FRESH, "max_concurrency": 1},
}
JAVA = ("libhdfs", "libjvm")
"""What pyarrow can't load where Hadoop is not installed. It says so with an error of the system's."""


def open_store(url: str, *, options: Options | None = None, retry: Retry | None = None) -> Store:
    """The store at a URL or plain path; ConfigError says what is wrong with it, or which driver is missing.

    `options` go to the fsspec file system (endpoint, credentials); without them its own configuration counts.
    """
    address = parse(url)
    protocol = address.protocol
    if not protocol:
        return PosixStore(Path(address.root), retry=retry)
    kind = {"memory": SharedMemoryStore, "s3": S3Store, "s3a": S3Store}.get(protocol, ObjectStore)
    arguments = {**DEFAULTS.get(protocol, FRESH), **address.options, **(options or {})}
    return kind(
        lambda: _connect(url, protocol, arguments), root=address.root, url=url.rstrip("/"), retry=retry
    )


def file_system(url: str) -> fsspec.AbstractFileSystem:
    """The fsspec file system of a URL that is no path of this machine, with the errors of `open_store`."""
    address = parse(url)
    arguments = {**DEFAULTS.get(address.protocol, FRESH), **address.options}
    return _connect(url, address.protocol, arguments)


def _connect(url: str, protocol: str, arguments: Options) -> fsspec.AbstractFileSystem:
    try:
        return fsspec.filesystem(protocol, **arguments)
    except ImportError as error:
        raise ConfigError(
            field="storage_path",
            problem=f"{url!r} needs a driver that is not installed here ({error}).",
            remedy=f"Install it on every machine: pip install {package_of(protocol)}",
        ) from error
    except OSError as error:
        if not any(library in str(error) for library in JAVA):
            raise
        raise ConfigError(
            field="storage_path",
            problem=f"{url!r} is read by Hadoop's own library, and that or its Java is not here.",
            remedy="Install both on every machine, with JAVA_HOME, HADOOP_HOME and CLASSPATH set.",
        ) from error
    except (TypeError, ValueError) as error:
        raise ConfigError(
            field="storage_path", problem=f"{url!r} can't be opened: {type(error).__name__}: {error}"
        ) from error


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
