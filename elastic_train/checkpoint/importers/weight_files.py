"""Find the model's weight files in a Hugging Face directory.

Names that Hugging Face itself gives are believed. Several files that nothing joins are an error: which of
them is meant, only whoever asks can say.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elastic_train.errors import ChecksumMismatch, NoCheckpoint, StorageError
from elastic_train.storage.store import Store, check_path

SAFE, TORCH = ".safetensors", ".bin"
MODELS = (".pt", ".pth", ".ckpt", ".pt.tar", ".pth.tar")
"""How files are called that hold a model and whatever a job keeps beside it."""
SINGLE = {SAFE: ("model.safetensors",), TORCH: ("pytorch_model.bin", "pytorch_model_fsdp.bin")}
INDEX = ".index.json"
_PART = re.compile(r"(.+)-(\d{1,9})-of-(\d{1,9})(\.safetensors|\.bin)")
STATES = re.compile(
    r"optimizer(_\d+)?\.(pt|bin)|scheduler(_\d+)?\.(pt|bin)|rng_state(_\d+)?\.pth|training_args\.bin|"
    r"scaler\.pt|sampler(_\d+)?\.bin|dl_state_dict(_\d+)?\.bin"
)
"""Files beside the weights that are not weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFiles:
    """`listed` is tensor -> file where there is an index; `beside` are files that look like weights too."""

    names: Sequence[str]
    suffix: str
    listed: Mapping[str, str] | None
    beside: Sequence[str]


def weight_files(store: Store, at: str, names: Sequence[str]) -> WeightFiles | None:
    """The files that are the model; None where there are none, NoCheckpoint where it can't be told.

    Without an index, files of ranks and of complete series are joined by whoever reads them.
    """
    url = f"{store.url}/{at}".rstrip("/")
    for suffix in (SAFE, TORCH):
        found = [n for n in names if n.endswith(suffix) and not STATES.fullmatch(n)]
        if suffix == TORCH:  # a name that anybody may give
            found = [n for n in found if n in SINGLE[TORCH] or _PART.fullmatch(n)]
        indices = [n for n in names if n.endswith(suffix + INDEX)]
        usual = [n for n in SINGLE[suffix] if n in found]
        if not found and not indices:
            continue
        if len(indices) > 1 or len(usual) > 1:
            raise ambiguous(url, indices if len(indices) > 1 else usual)
        listed = _weight_map(store, f"{at}/{indices[0]}" if at else indices[0]) if indices else None
        if listed is not None:
            chosen = sorted(set(listed.values()))
            if strange := [n for n in usual if n not in chosen]:
                raise ambiguous(url, [strange[0], indices[0]])
        elif usual:
            chosen = usual
        elif len(found) > 1 and suffix == TORCH and not _series(found):
            raise ambiguous(url, found)
        else:
            chosen = found
        others = [n for n in names if n.endswith(MODELS) and not STATES.fullmatch(n)]
        if others and listed is None and not usual and len(chosen) == 1:
            raise ambiguous(url, [*chosen, *others])
        beside = [*others] + [
            n for n in names if n.endswith((SAFE, TORCH)) and n not in chosen and not STATES.fullmatch(n)
        ]
        return WeightFiles(names=chosen, suffix=suffix, listed=listed, beside=beside)
    return None


def is_series(names: Sequence[str]) -> bool:
    """Whether the names are those of all parts of one model."""
    return _series(names)


def ambiguous(url: str, names: Sequence[str]) -> NoCheckpoint:
    return NoCheckpoint(
        url=url,
        problem=f"it has {' and '.join(names[:8])}, and nothing says which of them is meant. Open one "
        f"of them, as {url}/{names[0]}.",
    )


def _series(names: Sequence[str]) -> bool:
    parts = [_PART.fullmatch(n) for n in names]
    if not all(parts):
        return False
    said = {(m[1], int(m[3])) for m in parts if m is not None}
    numbers = {int(m[2]) for m in parts if m is not None}
    return len(said) == 1 and len(names) == len(numbers) == next(iter(said))[1] and max(numbers) == len(names)


def _weight_map(store: Store, path: str) -> dict[str, str]:
    """Tensor -> file, as an index has it."""
    url = f"{store.url}/{path}"
    try:
        listed = json.loads(store.read(path))["weight_map"]
        if not isinstance(listed, dict) or not listed:
            raise ValueError("it lists nothing")
        for file in set(listed.values()):
            check_path(file)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, StorageError) as error:
        raise ChecksumMismatch(
            url=url, problem=f"the index can't be used ({error}). Copy it again."
        ) from error
    return listed
