"""What a checkpoint says of its optimizer states' kinds, and the boxes that go with a box of a parameter.

The kinds are in the document, at `optimizer.reshard`: {tensor: {state: [kind, ...]}}. What is elementwise, or
one element, isn't mentioned. Checkpoints that say nothing are told by names and shapes
(geometry/state_layout.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from elastic_train.checkpoint.account import Name
from elastic_train.checkpoint.document import Json
from elastic_train.checkpoint.lazy_arrays import TensorInfo
from elastic_train.errors import FormatUnsupported, TensorMismatch
from elastic_train.geometry.box import Box
from elastic_train.geometry.fragments import Fragments
from elastic_train.geometry.state_layout import (
    Blockwise,
    Coupled,
    Elementwise,
    Kind,
    Projection,
    Scalar,
    follow,
    kinds,
    misfit,
)

KEY = "reshard"
FEATURE = "reshard"
"""What a reader must know to cut a state that can't be cut everywhere."""
Tensors = Mapping[Name, TensorInfo]


def recorded(document: Mapping[str, Json], tensors: Tensors, *, url: str) -> dict[str, Json]:
    """The document with the kinds of all states that are neither elementwise nor one element."""
    made = dict(document)
    optimizer = document.get("optimizer")
    if not isinstance(optimizer, Mapping):
        return made
    table: dict[str, dict[str, Json]] = {}
    for (tensor, state), kind in kinds_of(document, tensors, url=url).items():
        if not isinstance(kind, Elementwise | Scalar) or tensors[tensor, state].shape not in ((), (1,)):
            words = as_words(kind)
            if words[0] != "elementwise":
                table.setdefault(tensor, {})[state] = words
    rest: dict[str, Json] = {k: v for k, v in optimizer.items() if k != KEY}
    made["optimizer"] = rest | ({KEY: table} if table else {})
    return made


def required(document: Mapping[str, Json]) -> tuple[str, ...]:
    """The features without which a reader would cut a state of this document wrongly."""
    table = (document.get("optimizer") or {}).get(KEY) or {}
    strict = any(words[0] in ("block", "coupled") for states in table.values() for words in states.values())
    return (FEATURE,) if strict else ()


def kinds_of(document: Mapping[str, Json], tensors: Tensors, *, url: str) -> dict[Name, Kind]:
    """The kind of every optimizer state; FormatUnsupported and TensorMismatch where what is said can't be."""
    said: Mapping[str, Mapping[str, Any]] = (document.get("optimizer") or {}).get(KEY) or {}
    states: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {}
    for (tensor, state), info in tensors.items():
        if state not in ("param", "buffer") and (tensor, "param") in tensors:
            states.setdefault(tensor, {})[state] = (info.dtype, info.shape)
    found: dict[Name, Kind] = {}
    for tensor, own in states.items():
        shape = tensors[tensor, "param"].shape
        reported = kinds(shape, own)
        for state, (_, state_shape) in own.items():
            words = said.get(tensor, {}).get(state)
            kind = reported[state] if words is None else from_words(words, f"{tensor} ({state})", url)
            if (problem := misfit(kind, shape, state_shape)) is not None:
                raise TensorMismatch(
                    url=url, problem=f"{tensor} ({state}) is {list(state_shape)}, and {problem}."
                )
            found[tensor, state] = kind
    return found


def box_of(name: Name, box: Box, tensors: Tensors, found: Mapping[Name, Kind], *, url: str) -> Box:
    """The box of a state that goes with a box of its parameter; TensorMismatch where there is none."""
    kind = found.get(name, Elementwise())
    part = follow(kind, tensors[name[0], "param"].shape, tensors[name].shape, box)
    if isinstance(part, str):
        raise TensorMismatch(
            url=url,
            problem=f"{name[0]} ({name[1]}) can't be cut like this: {part}. Choose a plan that keeps the "
            "parameter whole or cuts it there.",
        )
    return part


def as_words(kind: Kind) -> list[Json]:
    """A kind as the document has it."""
    match kind:
        case Elementwise():
            return ["elementwise"]
        case Scalar():
            return ["scalar"]
        case Projection(dims):
            return ["projection", list(dims)]
        case Blockwise(size, each):
            return ["block", size, each]
        case Coupled():
            return ["coupled"]


def from_words(words: Any, name: str, url: str) -> Kind:
    match words:
        case ["elementwise"]:
            return Elementwise()
        case ["scalar"]:
            return Scalar()
        case ["projection", [*dims]] if all(d is None or type(d) is int for d in dims):
            return Projection(tuple(dims))
        case ["block", int(size), int(each)]:
            return Blockwise(size, each)
        case ["coupled"]:
            return Coupled()
        case _:
            raise FormatUnsupported(
                url=url,
                problem=f"the state {name} is to be cut as {words!r}, unknown to this release. Upgrade "
                "elastic_train.",
            )


def check_cuts(needs: Fragments, tensors: Tensors, found: Mapping[Name, Kind], *, url: str) -> None:
    """TensorMismatch where a rank would hold a part of a parameter without the whole blocks of a state.

    A group holds coupled states whole on every rank, and has tried out that its optimizer works like this.
    """
    strict = [name for name, kind in found.items() if isinstance(kind, Blockwise)]
    if not strict:
        return
    keys = {name: number for number, name in enumerate(needs.names)}
    for name in strict:
        own = np.flatnonzero(needs.key == keys.get((name[0], "param"), -1))
        for row in own.tolist():
            box_of(name, needs.box(row), tensors, found, url=url)
