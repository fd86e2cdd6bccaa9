"""List what can be opened in a directory that is no checkpoint itself, for error messages."""

from __future__ import annotations

import os
import posixpath
import re
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from elastic_train.checkpoint.importers.weight_files import MODELS, SAFE, STATES, TORCH
from elastic_train.checkpoint.importers.zip_index import LEGACY
from elastic_train.errors import StorageError, StorageNotFound
from elastic_train.storage.fsspec_store import is_local
from elastic_train.storage.store import Store

SHOWN = 8
MOST = 10_000
"""Names that are looked at, the nearest first."""
_MARKS = frozenset(
    (
        ".metadata", "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin",
        "pytorch_model.bin.index.json", "latest", "latest_universal", "mp_rank_00_model_states.pt",
        "zero_pp_rank_0_mp_rank_00_model_states.pt", "_CHECKPOINT_METADATA",
    )
)  # fmt: skip
"""Files that only a checkpoint's directory has, or one that names the latest."""
_PARTS = re.compile(r"(.*_)?(mp|pp|expp)_rank_\d+.*|layer_\d+-.*|.*\.distcp|__\d+_\d+.*")
"""Files that are parts of a checkpoint."""
_SUFFIXES = (SAFE, TORCH, *MODELS, ".tar", ".distcp", ".index.json")
"""Files that at least belong to some checkpoint."""


def is_model(name: str) -> bool:
    """Whether a file has a name that models of torch have, and none of those that lie beside them."""
    return name.endswith((*MODELS, TORCH))


def lone_model(store: Store) -> str | None:
    """The one model's file of a directory, as jobs of Ray Train write it."""
    found = [n for n in store.names() if _may_be_model(n)]
    if len(found) != 1 or found[0].endswith(SAFE):
        return None
    head = store.read(found[0], 0, min(store.size(found[0]), len(LEGACY)))
    return found[0] if head.startswith((b"PK", LEGACY)) else None


def what_to_open(store: Store, url: str) -> str:
    """A sentence with the choices; what to check where there is nothing of the kind."""
    try:
        names = list(_below(local_path(url))) if is_local(url) else list(store.list())
    except StorageNotFound:
        names = []
    except StorageError as error:  # the path may be a file that is no checkpoint
        return f"It can't be looked into: {error}."
    if not names:
        return "Nothing at all is there: check the path, or wait for a save."
    found = _choices(names) or _loose(names)
    if not found:
        return "Check the path, or wait for a save."
    kind = "file" if set(found) <= set(names) else "directory"
    some = ", ".join(f"{url.rstrip('/')}/{path}" for path in found[:SHOWN])
    more = f" (and {len(found) - SHOWN} more)" if len(found) > SHOWN else ""
    return f"Name the {kind} that is meant: {some}{more}."


def local_path(url: str) -> Path:
    """Where a URL of this machine's file system leads."""
    protocol, split, rest = url.partition("://")
    return Path(f"/{rest.lstrip('/')}" if split else protocol).expanduser()


def _choices(names: Sequence[str]) -> list[str]:
    """Directories and files that are checkpoints by their names, those with the highest numbers first."""
    directories: dict[str, list[str]] = {}
    for path in names:
        directory, _, name = path.rpartition("/")
        directories.setdefault(directory, []).append(name)
    found = [path for at, inside in directories.items() for path in _in_directory(at, inside)]
    return sorted(found, key=_numbers, reverse=True)


def _in_directory(at: str, names: Sequence[str]) -> list[str]:
    if at and any(name in _MARKS for name in names):
        return [at]
    models = [n for n in names if _may_be_model(n)]
    return [at] if at and len(models) == 1 else [f"{at}/{n}" if at else n for n in models]


def _loose(names: Sequence[str]) -> list[str]:
    """Files that are parts of something; if there are none, directories with such files."""
    found = [name for name in names if name.endswith(_SUFFIXES)]
    files = sorted(name for name in found if "/" not in name)
    return files or sorted({posixpath.dirname(name) for name in found})


def _below(top: Path) -> Iterator[str]:
    """Files below a directory; what can't be looked at has none. Links to directories aren't followed."""
    looked, left = 0, deque([top])
    while left and looked < MOST:
        directory = left.popleft()
        for entry in _entries(directory):
            looked += 1
            if entry.is_dir(follow_symlinks=False):
                left.append(directory / entry.name)
            elif not _leads_to_a_directory(entry):
                yield (directory / entry.name).relative_to(top).as_posix()


def _leads_to_a_directory(link: os.DirEntry[str]) -> bool:
    try:
        return link.is_dir()
    except OSError:
        return False


def _entries(directory: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as entries:
            return sorted(islice(entries, MOST), key=lambda entry: entry.name)
    except OSError:
        return []


def _may_be_model(name: str) -> bool:
    known = is_model(name) or name.endswith(SAFE)
    return known and not STATES.fullmatch(name) and not _PARTS.fullmatch(name)


def _numbers(path: str) -> list[tuple[int, str]]:
    """A key under which checkpoint-20 comes before checkpoint-100."""
    return [(int(part[:18]), part) if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", path)]
