"""What the keys of torch.distributed.checkpoint mean: parameters, optimizer states, hyperparameters.

Torch keeps nested state dicts under flat keys and, usually, the nesting. The optimizer's part is recognised
by `state` and `param_groups`; in flat forms only if what follows is the name of a stored parameter.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from elastic_train.checkpoint.document import Json
from elastic_train.checkpoint.importers.dcp_metadata import Metadata
from elastic_train.checkpoint.importers.foreign_document import OptimizerState, ParameterGroup, document
from elastic_train.errors import FormatUnsupported

MODELS = frozenset({"model", "app", "state_dict", "module"})
"""Words at the beginning of a path that only say that the model follows."""
STEPS = ("step", "global_step", "train_state.step", "iteration")
"""Keys under which systems keep the number of steps."""
_PART = re.compile(r"(?:^|\.)state\.(.+)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Name:
    tensor: str
    state: str
    optimizer: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """Key -> name for tensors; for hyperparameters key -> (group number or parameter, name)."""

    tensors: Mapping[str, Name]
    hyperparameters: Mapping[str, tuple[int | str, str]]


def named(metadata: Metadata, *, url: str) -> Names:
    """The meaning of every key; FormatUnsupported where two keys would be one tensor."""
    tensors: dict[str, Name] = {}
    pending: list[str] = []
    for key in metadata.tensors:
        path = metadata.paths.get(key, (key,))
        nested = _nested(path)
        if nested is not None:
            tensors[key] = nested
        elif _PART.search(key):
            pending.append(key)
        else:
            tensors[key] = Name(tensor=_model(path), state="param")
    known = {name.tensor for name in tensors.values()}
    for key in pending:
        tensors[key] = _flat(key, known) or Name(tensor=key, state="param")
    taken: dict[tuple[str, str], str] = {}
    for key, name in tensors.items():
        other = taken.setdefault((name.tensor, name.state), key)
        if other != key:
            problem = (
                f"{other} and {key} would both be {name.tensor} ({name.state}). Save one model at a time."
            )
            raise FormatUnsupported(url=url, problem=problem)
    return Names(
        tensors=tensors,
        hyperparameters={
            key: found
            for key in metadata.objects
            if (found := _hyperparameter(metadata.paths.get(key, (key,)), known)) is not None
        },
    )


def document_of(
    names: Names,
    scalars: Mapping[str, tuple[str, Any]],
    values: Mapping[str, Any],
    unread: Iterable[str],
    aliases: Mapping[str, str],
) -> dict[str, Json]:
    """The document; objects of which nothing is known are in `foreign.objects`."""
    groups: dict[int | str, dict[str, Any]] = {}
    rest: dict[str, Any] = {}
    for key, value in values.items():
        if key in names.hyperparameters:
            group, name = names.hyperparameters[key]
            groups.setdefault(group, {})[name] = list(value) if isinstance(value, tuple) else value
        else:
            rest[key] = value
    own: dict[str, dict[str, Any]] = {}
    for key, (dtype, value) in scalars.items():
        name = names.tensors[key]
        own.setdefault(name.tensor, {})[name.state] = {"value": value, "dtype": dtype}
    states = tuple(
        (name.tensor, name.state)
        for key, name in names.tensors.items()
        if name.optimizer and key not in scalars
    )
    return document(
        step=next((rest[k] for k in STEPS if isinstance(rest.get(k), int)), None),
        aliases=aliases,
        optimizer=OptimizerState(groups=_groups(groups), scalars=own, states=states),
        system="torch.distributed.checkpoint",
        facts={"objects": rest},
        not_restored=[*unread, *(f"{key}: it is in foreign.objects" for key in sorted(rest))],
    )


def _nested(path: tuple[str | int, ...]) -> Name | None:
    """(..., "state", parameter, state)"""
    if len(path) >= 3 and path[-3] == "state":
        return Name(tensor=str(path[-2]), state=str(path[-1]), optimizer=True)
    return None


def _model(path: tuple[str | int, ...]) -> str:
    parts = [str(p) for p in path]
    while len(parts) > 1 and parts[0] in MODELS:
        parts.pop(0)
    return ".".join(parts)


def _flat(key: str, known: set[str]) -> Name | None:
    """`state.<parameter>.<state>`, or Megatron's `optimizer.state.<state>.<parameter>`."""
    found = _PART.search(key)
    assert found is not None
    head, _, tail = found[1].partition(".")
    if tail in known:
        return Name(tensor=tail, state=head, optimizer=True)
    head, _, tail = found[1].rpartition(".")
    if head in known:
        return Name(tensor=head, state=tail, optimizer=True)
    return None


def _hyperparameter(path: tuple[str | int, ...], known: set[str]) -> tuple[int | str, str] | None:
    """(..., "param_groups", number, name), or `param_groups.<parameter>.<name>`."""
    if len(path) >= 3 and path[-3] == "param_groups" and isinstance(path[-2], int):
        return path[-2], str(path[-1])
    text = ".".join(map(str, path))
    _, found, rest = text.rpartition("param_groups.")
    head, _, tail = rest.rpartition(".")
    if not found or not head:
        return None
    if head.isdecimal():
        return int(head), tail
    return (head, tail) if head in known else None


def _groups(groups: Mapping[int | str, dict[str, Any]]) -> tuple[ParameterGroup, ...]:
    """The groups as they were numbered; where they are per parameter, those with equal settings in one."""
    made: list[tuple[list[str], dict[str, Any]]] = []
    for key in sorted(groups, key=lambda k: (isinstance(k, str), k)):
        settings = dict(groups[key])
        params = settings.pop("params", [])
        if isinstance(key, int):
            made.append((list(params), settings))
            continue
        for other, known in made:
            if known == settings:
                other.append(key)
                break
        else:
            made.append(([key], settings))
    return tuple(ParameterGroup(params=tuple(params), hyperparameters=settings) for params, settings in made)
