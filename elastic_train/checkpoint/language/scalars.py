"""The document through a specification: what it says per tensor goes where the tensor goes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from elastic_train.checkpoint.document import Json
from elastic_train.checkpoint.language.resolve import Resolved
from elastic_train.checkpoint.language.virtual import Virtual
from elastic_train.errors import TensorMismatch

PARAM = "param"


def map_document(document: Mapping[str, Json], resolved: Resolved, *, url: str) -> dict[str, Json]:
    """The document with tensors renamed. Tensors that are joined must have equal scalars and hyperparameters.

    TensorMismatch names two that differ.
    """
    made = dict(document)
    made["aliases"] = dict(resolved.aliases)
    if "trainable" in document:
        made["trainable"] = _trainable(document["trainable"], resolved, url)
    if document.get("optimizer") is not None:
        made["optimizer"] = _optimizer(document["optimizer"], resolved, url)
    return made


def _origins(resolved: Resolved, told: Collection[str]) -> dict[str, list[str]]:
    """Our parameter -> the stored ones that it is made of; where nothing is told of these, the one that its
    moments are of: they may be kept whole, under another name than the parts of its value.
    """
    made = {
        tensor: _sources(virtual) for (tensor, state), virtual in resolved.tensors.items() if state == PARAM
    }
    known = set(told)
    for (tensor, state), virtual in resolved.tensors.items():
        if state != PARAM and not known & {*made.get(tensor, ())} and known & {*_sources(virtual)}:
            made[tensor] = _sources(virtual)
    return made


def _sources(virtual: Virtual) -> list[str]:
    return sorted({t.source.tensor for t in virtual.tiles if t.source is not None})


def _trainable(trainable: list[str], resolved: Resolved, url: str) -> list[str]:
    known = set(trainable)
    found: list[str] = []
    for tensor, origins in _origins(resolved, known).items():
        if _one(tensor, "trainable", [o in known for o in origins], url):
            found.append(tensor)
    return found


def _optimizer(optimizer: Mapping[str, Any], resolved: Resolved, url: str) -> dict[str, Any]:
    made = dict(optimizer)
    group_of = {fqn: i for i, group in enumerate(optimizer["groups"]) for fqn in group["params"]}
    origins = _origins(resolved, group_of)
    place = {fqn: i for group in optimizer["groups"] for i, fqn in enumerate(group["params"])}
    members: list[list[str]] = [[] for _ in optimizer["groups"]]
    scalars: dict[str, Any] = {}
    for tensor, parts in sorted(
        origins.items(), key=lambda item: min((place.get(p, 0) for p in item[1]), default=0)
    ):
        group = _one(tensor, "optimizer group", [group_of.get(p) for p in parts], url)
        if group is not None:
            members[group].append(tensor)
        own = _one(tensor, "optimizer scalars", [optimizer["scalars"].get(p) for p in parts], url)
        if own is not None:
            scalars[tensor] = own
    made["groups"] = [
        {**group, "params": names} for group, names in zip(optimizer["groups"], members, strict=True)
    ]
    made["scalars"] = scalars
    known = {(tensor, state) for tensor, state in optimizer["states"]}
    made["states"] = [
        [tensor, state]
        for (tensor, state), virtual in resolved.tensors.items()
        if any(t.source is not None and (t.source.tensor, t.source.state) in known for t in virtual.tiles)
    ]
    table = optimizer.get("reshard") or {}
    kept = {(t, s): words for t, states in table.items() for s, words in states.items()}
    moved: dict[str, dict[str, Any]] = {}
    for (tensor, state), virtual in resolved.tensors.items():
        sources = {(t.source.tensor, t.source.state) for t in virtual.tiles if t.source is not None}
        for name in sources & kept.keys():
            if not _renamed(virtual):
                raise TensorMismatch(
                    url=url,
                    problem=f"{name[0]} ({name[1]}) is cut as {kept[name]!r} and can only be renamed. Leave "
                    "it out with `ignore`, or apply no operations to it.",
                )
            moved.setdefault(tensor, {})[state] = kept[name]
    made.pop("reshard", None)
    return made | ({"reshard": moved} if moved else {})


def _renamed(virtual: Virtual) -> bool:
    """Whether it is all of one stored tensor, as that is."""
    if len(virtual.tiles) != 1 or virtual.casts:
        return False
    tile = virtual.tiles[0]
    at = tile.source
    dims = len(virtual.shape)
    return at is not None and at.axes == tuple(range(dims)) and at.origin == (0,) * dims


def _one(tensor: str, what: str, values: list[Any], url: str) -> Any:
    for value in values[1:]:
        if value != values[0]:
            raise TensorMismatch(
                url=url,
                problem=f"{tensor} is made of tensors with different {what}: {values[0]!r}, {value!r}.",
            )
    return values[0] if values else None
