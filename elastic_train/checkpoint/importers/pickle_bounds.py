"""Bounds of a value that was read from a pickle: how deep it is, and how large if it is walked as a tree.

A few bytes can name one container many times over, level upon level, so that a walk over it never ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from elastic_train.errors import FormatUnsupported

NESTING = 200
FLOOR, FACTOR = 100_000, 8
"""Parts that any value may have when it is walked, and as many more for each byte of its pickle."""
Inside = Callable[[object], Iterable[Any] | None]
"""The parts of an object; None for one that is no container."""


@dataclass(slots=True)
class _Level:
    value: object
    parts: Iterator[Any]
    last_object: int  # the lowest level, up to this one, that is an object and no container of Python's
    size: int = 1


def check_bounds(value: object, inside: Inside, *, length: int, url: str) -> None:
    """FormatUnsupported where the value of a pickle of `length` bytes is too deep or too large, or contains
    itself. An object may lead back to what it is in, as nodes do to their parents.
    """
    budget = FLOOR + FACTOR * length
    sizes: dict[int, int] = {}
    places: dict[int, int] = {}
    levels: list[_Level] = []

    def enter(found: object) -> None:
        if len(levels) == NESTING:
            raise FormatUnsupported(url=url, problem=f"it is nested deeper than {NESTING} levels.")
        parts = _parts(found)
        is_object = parts is None
        above = levels[-1].last_object if levels else -1
        places[id(found)] = len(levels)
        own = inside(found) if parts is None else parts
        levels.append(_Level(found, iter(own or ()), len(levels) if is_object else above))

    enter(value)
    while levels:
        level = levels[-1]
        for part in level.parts:
            if _parts(part) is None and inside(part) is None:
                level.size += 1
            elif (known := sizes.get(id(part))) is not None:
                level.size += known
            elif (place := places.get(id(part))) is None:
                enter(part)
                break
            elif level.last_object < place:
                raise FormatUnsupported(url=url, problem="a container in it contains itself.")
            else:
                level.size += 1
        else:
            levels.pop()
            del places[id(level.value)]
            sizes[id(level.value)] = level.size
            if levels:
                levels[-1].size += level.size
        if level.size > budget:
            raise FormatUnsupported(
                url=url,
                problem=f"what it says has over {budget} parts, more than its {length} bytes may stand for.",
            )


def _parts(value: object) -> Iterable[Any] | None:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list | tuple) else None
