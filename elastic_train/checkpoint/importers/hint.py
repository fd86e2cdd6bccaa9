"""What a person may have meant by a path where no checkpoint is: a file in it, or a directory in it."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from elastic_train.errors import StorageError, StorageNotFound
from elastic_train.storage.fsspec_store import is_local
from elastic_train.storage.store import Store

SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".tar", ".distcp", ".metadata", ".index.json")
MOST = 10_000
"""Names that are looked at."""
SHOWN = 3


def meant_instead(store: Store, url: str) -> str:
    """A sentence with what to open instead; what to check where there is nothing of the kind."""
    try:
        names = list(islice(_near(local_path(url)) if is_local(url) else store.list(), MOST))
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


def local_path(url: str) -> Path:
    """Where a URL of this machine's file system leads."""
    protocol, split, rest = url.partition("://")
    return Path(f"/{rest.lstrip('/')}" if split else protocol).expanduser()


def _near(directory: Path) -> Iterator[str]:
    """Names of files in a directory and in those in it; what can't be looked at has none."""
    for entry in _entries(directory):
        if entry.is_dir():
            yield from (f"{entry.name}/{inner.name}" for inner in _entries(entry) if inner.is_file())
        else:
            yield entry.name


def _entries(directory: Path) -> list[Path]:
    try:
        return sorted(islice(directory.iterdir(), MOST))
    except OSError:
        return []


def _shown(url: str, names: list[str]) -> str:
    more = f" (and {len(names) - SHOWN} more)" if len(names) > SHOWN else ""
    return ", ".join(f"{url.rstrip('/')}/{name}" for name in names[:SHOWN]) + more
