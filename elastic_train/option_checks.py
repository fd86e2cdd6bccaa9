"""Checks of the values that a person gives as options: each refuses one with a ConfigError that names it."""

from __future__ import annotations

import functools
import numbers
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from elastic_train.errors import ConfigError


def positive(name: str, value: float) -> None:
    if not value > 0:  # nor NaN
        raise ConfigError(field=name, problem=f"must be positive, got {value}.")


LONGEST_S = 1e9
"""More than any run lasts, and less than what a thread can be told to wait for."""


def seconds(name: str, value: float) -> None:
    """A time that something is waited for: never nothing, and never without an end."""
    positive(name, value)
    if value > LONGEST_S:
        raise ConfigError(
            field=name,
            problem=f"must be at most {LONGEST_S:g} s, which is 30 years, got {value}.",
            remedy="Say a number that is long enough.",
        )


def of_type(name: str, value: object, hint: Any) -> None:
    """Refuse a value that is not of a type, as annotations name it."""
    if not _fits(value, hint):
        raise ConfigError(field=name, problem=f"must be {_said(hint)}, got {value!r}.")


def at_least(least: int, name: str, value: float) -> None:
    if not value >= least:
        raise ConfigError(field=name, problem=f"must be {least} or more, got {value}.")


def typed(options: object, where: str) -> None:
    """Refuse a value that is not of its field's type: it would fail late, or mean something else."""
    for name, hint in _hints(type(options)).items():
        of_type(f"{where}{name}", getattr(options, name), hint)


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _fits(value: object, hint: Any) -> bool:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin in (Union, UnionType):
        return any(_fits(value, one) for one in arguments)
    if origin is Literal:
        return isinstance(value, str) and value in arguments
    if hint in (int, float):
        kind = numbers.Integral if hint is int else numbers.Real
        return not isinstance(value, bool) and isinstance(value, kind)
    return isinstance(value, origin or hint)


def _said(hint: Any) -> str:
    """A type in a person's words."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(_said(one) for one in arguments)
    if origin is Literal:
        return " or ".join(map(repr, arguments))
    plain = {
        int: "a whole number",
        float: "a number",
        str: "a text",
        bool: "True or False",
        type(None): "None",
    }
    return plain.get(origin or hint) or f"a {(origin or hint).__name__}"
