"""What may be opened inside of a directory that is no checkpoint itself: so that an error can name it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from elastic_train.checkpoint.importers.weight_files import MODELS, SAFE, STATES, TORCH, names_in
from elastic_train.checkpoint.importers.zip_index import LEGACY
from elastic_train.storage.store import Store

SHOWN = 8
_MARKS = frozenset(
    (
        ".metadata", "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin",
        "pytorch_model.bin.index.json", "latest", "latest_universal", "mp_rank_00_model_states.pt",
        "zero_pp_rank_0_mp_rank_00_model_states.pt",
    )
)  # fmt: skip
"""Files that only a checkpoint's directory has, or one that names the latest."""
_PARTS = re.compile(r"(.*_)?(mp|pp|expp)_rank_\d+.*|layer_\d+-.*|.*\.distcp|__\d+_\d+.*")
"""Files that are parts of a checkpoint."""


def is_model(name: str) -> bool:
    """Whether a file has a name that models of torch have, and none of those that lie beside them."""
    return name.endswith((*MODELS, TORCH))


def lone_model(store: Store) -> str | None:
    """The one model's file of a directory, as jobs of Ray Train write it."""
    found = [n for n in names_in(store, "") if _may_be_model(n)]
    if len(found) != 1 or found[0].endswith(SAFE):
        return None
    head = store.read(found[0], 0, min(store.size(found[0]), len(LEGACY)))
    return found[0] if head.startswith((b"PK", LEGACY)) else None


def told(url: str, found: Sequence[str]) -> str:
    """A sentence with the choices."""
    files = [path for path in found if _may_be_model(path.rpartition("/")[2])]
    some = ", ".join(f"{url.rstrip('/')}/{path}" for path in found[:SHOWN])
    more = f" (and {len(found) - SHOWN} more)" if len(found) > SHOWN else ""
    return f"Name the {'file' if len(files) == len(found) else 'directory'} that is meant: {some}{more}."


def choices(store: Store) -> list[str]:
    """Directories and files inside, those with the highest numbers first."""
    directories: dict[str, list[str]] = {}
    for path in store.list(""):
        directory, _, name = path.rpartition("/")
        directories.setdefault(directory, []).append(name)
    found = [path for at, names in directories.items() for path in _in_directory(at, names)]
    return sorted(found, key=_numbers, reverse=True)


def _in_directory(at: str, names: Sequence[str]) -> list[str]:
    if at and any(name in _MARKS for name in names):
        return [at]
    models = [n for n in names if _may_be_model(n)]
    return [at] if at and len(models) == 1 else [f"{at}/{n}" if at else n for n in models]


def _may_be_model(name: str) -> bool:
    known = is_model(name) or name.endswith(SAFE)
    return known and not STATES.fullmatch(name) and not _PARTS.fullmatch(name)


def _numbers(path: str) -> list[tuple[int, str]]:
    """A key under which checkpoint-20 comes before checkpoint-100."""
    return [(int(part[:18]), part) if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", path)]
