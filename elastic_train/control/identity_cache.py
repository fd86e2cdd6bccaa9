"""Cache the last result of a function of a frozen value, keyed by the value's identity."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

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


class Carried(Generic[Key, Value]):
    """A mutable summary of one frozen value, carried along to the value that follows from it.

    `take` it from the value before, change it, and `put` it to the value after: for both the cost is that of
    the change. Asked about any other value, it is made anew.
    """

    def __init__(self, make: Callable[[Key], Value]) -> None:
        self._make = make
        self._last: tuple[Key, Value] | None = None

    def of(self, key: Key) -> Value:
        """To be read, and not to be kept."""
        known = self._last
        if known is None or known[0] is not key:
            known = self._last = (key, self._make(key))
        return known[1]

    def take(self, key: Key) -> Value:
        known, self._last = self._last, None
        return known[1] if known is not None and known[0] is key else self._make(key)

    def put(self, key: Key, value: Value) -> Key:
        self._last = (key, value)
        return key
