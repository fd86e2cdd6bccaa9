"""Closure cells of a function and of the functions that it wraps."""

from __future__ import annotations

from functools import partial
from typing import Any

_DEPTH = 4


def cells_of(function: Any, depth: int = _DEPTH) -> list[Any]:
    """The values, and the attributes of the object that a bound method, or a callable object, is of."""
    if isinstance(function, partial):
        return [function.args, function.keywords, *cells_of(function.func, depth - 1)]
    found: list[Any] = []
    for cell in getattr(function, "__closure__", None) or ():
        try:
            value = cell.cell_contents
        except ValueError:  # it has none yet
            continue
        if depth and hasattr(value, "__code__"):
            found += cells_of(value, depth - 1)
        else:
            found.append(value)
    owner = getattr(function, "__self__", None if hasattr(function, "__code__") else function)
    if hasattr(owner, "__dict__") and not isinstance(owner, type):
        found.append(vars(owner))
    return found
