"""What a person may have meant by a path where no checkpoint is: a file in it, or a directory in it."""

from __future__ import annotations

import posixpath
from itertools import islice

from elastic_train.errors import StorageError, StorageNotFound
from elastic_train.storage.store import Store

SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".tar", ".distcp", ".metadata", ".index.json")
MOST = 10_000
"""Names that are looked at."""
SHOWN = 3


def substituted(store: Store, url: str) -> str:
    """A sentence with what to open instead; what to check where there is nothing of the kind."""
    try:
        names = list(islice(store.list(), MOST))
    except StorageNotFound:
        names = []
    except StorageError as error:  # the path may be a file that is no checkpoint
        return f"It can't be looked into: {error}."
    if not names:
        return "Nothing at all is there: check the path, or wait for a save."
    found = [name for name in names if name.endswith(SUFFIXES)]
    files = sorted(name for name in found if "/" not in name)
    if files:
        return f"Name the file that is meant: {_shown(url, files)}."
    inside = sorted({posixpath.dirname(name) for name in found})
    if inside:
        return f"Name the directory that is meant: {_shown(url, inside)}."
    return "Check the path, or wait for a save."


def _shown(url: str, names: list[str]) -> str:
    more = f" (and {len(names) - SHOWN} more)" if len(names) > SHOWN else ""
    return ", ".join(f"{url.rstrip('/')}/{name}" for name in names[:SHOWN]) + more
