"""What exporters for torch systems share: names by what they are, groups and numbers as torch has them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from elastic_train.checkpoint.account import Name
from elastic_train.checkpoint.document import Json
from elastic_train.checkpoint.dtypes import ELEMENTS, element
from elastic_train.checkpoint.language.mapped import Readable

MODEL_STATES = ("param", "buffer")
DOCUMENT = "elastic_train"
"""The key under which the whole document is exported, for an import back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedState:
    """The tensors of a checkpoint by what they are. Every state that isn't the model's is the optimizer's."""

    params: tuple[str, ...]
    buffers: tuple[str, ...]
    states: tuple[Name, ...]


def named(source: Readable) -> NamedState:
    return NamedState(
        params=tuple(t for t, s in source.tensors if s == "param"),
        buffers=tuple(t for t, s in source.tensors if s == "buffer"),
        states=tuple(n for n in source.tensors if n[1] not in MODEL_STATES),
    )


def groups(document: Mapping[str, Json]) -> list[dict[str, Any]]:
    """The optimizer's groups, with the parameters' names and tuples where torch has tuples."""
    optimizer = document.get("optimizer") or {}
    return [
        {k: tuple(v) if isinstance(v, list) else v for k, v in group["hyperparameters"].items()}
        | {"params": list(group["params"])}
        for group in optimizer.get("groups", ())
    ]


def scalars(document: Mapping[str, Json]) -> Iterator[tuple[str, str, Any, str | None]]:
    """Parameter, state, value and, where it is a tensor, dtype of each number that the optimizer keeps."""
    optimizer = document.get("optimizer") or {}
    for tensor, own in optimizer.get("scalars", {}).items():
        for state, scalar in own.items():
            yield tensor, state, scalar["value"], scalar.get("dtype")


def scalar_bytes(value: Any, dtype: str) -> bytes:
    return np.array(value, dtype=element(dtype, url="optimizer").numpy).tobytes()


def tensor_bytes(source: Readable, name: Name) -> int:
    info = source.tensors[name]
    return math.prod(info.shape) * ELEMENTS[info.dtype].bytes
