"""Storage preflight: check before the first step that a store can hold a run."""

from __future__ import annotations

import secrets
import shutil
from dataclasses import dataclass

from elastic_train.errors import AlreadyExists, StorageError
from elastic_train.storage.object_store import no_conditional_create
from elastic_train.storage.posix_store import PosixStore
from elastic_train.storage.retry import failures_named
from elastic_train.storage.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A value that one node wrote and that every other must be able to read."""

    path: str
    value: bytes


def probe(store: Store, *, needed_bytes: int = 0) -> Token:
    """Write, read back, create twice and stream once; StorageError says which of it fails, and where.

    The token stays for the other nodes to `see`; the caller deletes its path. `needed_bytes` is compared
    with the free space where the store has a notion of it.
    """
    token = Token(path=f"preflight/{secrets.token_hex(8)}", value=secrets.token_bytes(64))
    store.create(token.path, token.value)
    try:
        store.create(token.path, token.value)
    except AlreadyExists:
        pass
    else:
        raise no_conditional_create(store.url, "a conditional create overwrote an object that was there")
    with store.stream(token.path) as sink:
        sink.write(token.value)
    see(store, token)
    free = free_bytes(store)
    if free is not None and free < needed_bytes:
        raise StorageError(
            path=store.url,
            operation="save to",
            problem=f"{needed_bytes} bytes are needed and {free} are free.",
        )
    return token


def see(store: Store, token: Token) -> None:
    """Check from here that the store is the one in which the token was written; StorageError if it isn't."""
    if not store.exists(token.path) or store.read(token.path) != token.value:
        raise StorageError(
            path=store.url,
            operation="share",
            problem="what another node wrote can't be seen here. Use a path that all nodes share.",
        )


def free_bytes(store: Store) -> int | None:
    """Bytes left on the device behind a local store; None where that has no meaning."""
    if not isinstance(store, PosixStore):
        return None
    with failures_named(what="measure", path=store.url):
        return shutil.disk_usage(store.url).free
