"""Stop and save requests and notes of faults, left as files in the run's storage.

A request names the term that it is meant for, so that it never stops a later submission.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from elastic_train.errors import AlreadyExists, StorageNotFound
from elastic_train.storage.store import Store

log = logging.getLogger(__name__)
MOST = 1_000_000


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


def ask_to_save(store: Store, term: int) -> None:
    """Each request is one checkpoint, but those that are heard together."""
    own = secrets.token_hex(8).encode()
    for number in range(saves_asked(store, term), MOST):
        path = f"{_saves(term)}/{number:06d}"
        try:
            store.create(path, own)
        except AlreadyExists:
            if store.read(path) != own:  # else it is this request, whose answer was lost
                continue
        return


def saves_asked(store: Store, term: int) -> int:
    """How many checkpoints were asked for in a term."""
    return len(store.list(_saves(term)))


def note_fault(
    store: Store, term: int, what: str, *, nodes: Sequence[str] = (), workers: Sequence[str] = ()
) -> None:
    """Say that something is about to be broken on purpose."""
    said = {"what": what, "nodes": list(nodes), "workers": list(workers), "own": secrets.token_hex(8)}
    body = json.dumps(said).encode()
    for number in range(len(store.list(_faults(term))), MOST):
        path = f"{_faults(term)}/{number:06d}.json"
        try:
            store.create(path, body)
        except AlreadyExists:
            if store.read(path) != body:  # else it is this note, whose answer was lost
                continue
        return


def faults_noted(store: Store, term: int, after: int) -> list[Mapping[str, Any] | None]:
    """What was broken on purpose in a term after so many notes; None for what is no note, which is said."""
    found: list[Mapping[str, Any] | None] = []
    for path in store.list(_faults(term))[after:]:
        data = store.read(path)
        try:
            said = json.loads(data)
            names = {key: [str(name) for name in said[key]] for key in ("nodes", "workers")}
            found.append({"what": str(said["what"]), **names})
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            log.warning("%s/%s is passed over: it is no note of a fault (%s)", store.url, path, error)
            found.append(None)
    return found


def _faults(term: int) -> str:
    return f"faults/t{term:06d}"


def _saves(term: int) -> str:
    return f"saves/t{term:06d}"


def _path(term: int) -> str:
    return f"stops/t{term:06d}.txt"
