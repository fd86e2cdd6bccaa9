"""Walk the tensors in batches and outputs of any structure.

A walk never changes what it is given. Containers keep their type: mappings of any class (UserDict and
BatchEncoding too), dataclasses, named tuples, lists, tuples, sets. Whatever else there is stays as it is.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch

Leaf = Callable[[torch.Tensor], torch.Tensor]


def mapped(value: Any, leaf: Leaf, other: Callable[[Any], Any] | None = None) -> Any:
    """`value` with `leaf` applied to each tensor in it, and `other` to each object that moves itself.

    Those have a method `to` and are no container, such as graphs, or tell apart what must stay on the host,
    as a PackedSequence does.
    """
    if isinstance(value, torch.Tensor):
        return leaf(value)
    if isinstance(value, str | bytes | int | float | bool | type | torch.nn.Module) or value is None:
        return value

    def inner(part: Any) -> Any:
        return mapped(part, leaf, other)

    if isinstance(value, Mapping):
        return _mapping(value, inner)
    if other is not None and moves_itself(value):
        return other(value)
    if dataclasses.is_dataclass(value):
        return with_attributes(value, {f.name: inner(getattr(value, f.name, None)) for f in _own(value)})
    if isinstance(value, tuple):
        parts = [inner(part) for part in value]
        return value._make(parts) if hasattr(value, "_make") else type(value)(parts)  # type: ignore[attr-defined]
    if type(value) is list:
        return [inner(part) for part in value]
    if isinstance(value, list):  # of a class of its own, which may hold more than its elements
        copied = copy.copy(value)
        copied[:] = [inner(part) for part in value]
        return copied
    if isinstance(value, set | frozenset) and any(isinstance(part, torch.Tensor) for part in value):
        return type(value)(inner(part) for part in value)
    return value


def moves_itself(value: Any) -> bool:
    return callable(getattr(value, "to", None)) and not isinstance(value, type)


def with_attributes(value: Any, attributes: Mapping[str, Any]) -> Any:
    """A copy of an object in which those attributes that changed have other values; frozen ones too."""
    changed = {name: new for name, new in attributes.items() if getattr(value, name, None) is not new}
    if not changed:
        return value
    copied = copy.copy(value)
    for name, new in changed.items():
        object.__setattr__(copied, name, new)
    return copied


def _own(value: Any) -> list[dataclasses.Field[Any]]:
    return [f for f in dataclasses.fields(value) if hasattr(value, f.name)]


def _mapping(value: Mapping[Any, Any], inner: Callable[[Any], Any]) -> Any:
    parts = {key: inner(part) for key, part in value.items()}
    if type(value) is dict:
        return parts
    if isinstance(value, MutableMapping):
        copied = copy.copy(value)
        for key, part in parts.items():
            copied[key] = part
        return copied
    try:
        return type(value)(parts)  # type: ignore[call-arg]
    except TypeError:  # a view or a class with arguments of its own
        return parts
