"""Public names of a package that are loaded when they are first asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazily(
    package: str, homes: Mapping[str, str], rooms: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package.

    `homes` says for each public name in which module below the package it is; `rooms` are modules that have a
    name of their own here, and are not listed.
    """
    rooms = rooms or {}

    def get(name: str) -> Any:
        if name in rooms:
            return import_module(f"{package}.{rooms[name]}")
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{homes[name]}"), name)

    return get, lambda: sorted(homes)
