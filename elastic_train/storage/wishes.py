"""A wish to stop a run, left in its storage for the controller of one term: no cluster is needed to ask.

A wish names the term that it is meant for, so that it never stops a later submission.
"""

from __future__ import annotations

from elastic_train.errors import AlreadyExists, StorageNotFound
from elastic_train.storage.store import Store


def ask_to_stop(store: Store, term: int, reason: str) -> None:
    """Asking twice is asking once."""
    try:
        store.create(_path(term), reason.encode())
    except AlreadyExists:
        return


def stop_asked(store: Store, term: int) -> str | None:
    """The reason that was given, None if nobody asked."""
    try:
        return store.read(_path(term)).decode()
    except StorageNotFound:
        return None


def _path(term: int) -> str:
    return f"stops/t{term:06d}.txt"
