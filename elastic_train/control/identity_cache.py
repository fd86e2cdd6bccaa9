"""Cache the last result of a function of a frozen value, keyed by the value's identity."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


def remembered(make: Callable[[Key], Value]) -> Callable[[Key], Value]:
    """`make`, computed anew only for another object. Of facts that few events change, such as the nodes, the
    others then cost nothing.
    """
    last: tuple[Key, Value] | None = None

    def get(key: Key) -> Value:
        nonlocal last
        known = last
        if known is not None and known[0] is key:
            return known[1]
        value = make(key)
        last = (key, value)
        return value

    return get
