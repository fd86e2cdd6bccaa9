"""Serialise frozen dataclasses to JSON values and back, exactly.

Reading follows the field types of the class; unknown fields are ignored and missing ones take their defaults,
so that a release reads what its neighbours wrote. Numbers that JSON does not have are written as strings,
dictionaries as pairs.
Where a field may hold one of several dataclasses, the value has to be written with names.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

Json = Mapping[str, Any]
NAME = "type"
"""The key of a dataclass's name, where names are written."""


def plain(value: Any, *, named: bool = False) -> Any:
    """A value as what JSON can hold; `named` writes the name of each dataclass beside its fields."""
    if is_dataclass(value) and not isinstance(value, type):
        inner = {f.name: plain(getattr(value, f.name), named=named) for f in fields(value)}
        return {NAME: type(value).__name__, **inner} if named else inner
    if isinstance(value, tuple | list):
        return [plain(entry, named=named) for entry in cast("tuple[Any, ...]", value)]
    if isinstance(value, dict):
        entries = cast("dict[Any, Any]", value).items()
        return [[plain(key, named=named), plain(entry, named=named)] for key, entry in entries]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


@cache
def reader(kind: Any) -> Callable[[Any], Any]:
    """How to read a value of a field's type. What it returns raises KeyError for what is missing, or a name
    that this release does not know.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        return _dataclass_reader(kind)
    if kind is float:
        return float
    if origin in (Union, types.UnionType):
        choices = [choice for choice in inner if choice is not type(None)]
        read = reader(choices[0]) if len(choices) == 1 else _choice_reader(choices)
        return lambda value: None if value is None else read(value)
    if origin is tuple and inner[-1] is Ellipsis:
        each = reader(inner[0])
        return lambda value: tuple(each(entry) for entry in value)
    if origin is list:
        each = reader(inner[0])
        return lambda value: [each(entry) for entry in value]
    if origin is dict:
        key, entry = reader(inner[0]), reader(inner[1])
        return lambda value: {key(k): entry(v) for k, v in value}
    if origin is tuple:
        readers = tuple(reader(entry) for entry in inner)
        return lambda value: tuple(read(entry) for read, entry in zip(readers, value, strict=True))
    assert origin is Literal or kind in (int, str, bool), kind
    return lambda value: value


def _choice_reader(choices: list[Any]) -> Callable[[Any], Any]:
    """One of several dataclasses, by the name that it was written with."""
    assert all(is_dataclass(choice) for choice in choices), choices
    named = {kind.__name__: reader(kind) for kind in cast("list[type]", choices)}
    return lambda value: named[value[NAME]](value)


def _dataclass_reader(kind: Any) -> Callable[[Any], Any]:
    hints = get_type_hints(kind)
    readers = {f.name: reader(hints[f.name]) for f in fields(kind)}
    required = {f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING}

    def read(record: Json) -> Any:
        return kind(
            **{
                name: each(record[name])
                for name, each in readers.items()
                if name in record or name in required
            }
        )

    return read
