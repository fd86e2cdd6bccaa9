"""Tuples kept in the order of workers' names, so that one of thousands is found without a look at each.

Of a large group every member has something to say when it ends. What was heard is kept in tuples, as all is;
searching them from the front would cost the square of the group.
"""

from __future__ import annotations

from bisect import bisect_left
from operator import itemgetter
from typing import TypeVar

T = TypeVar("T")
Entries = tuple[tuple[str, T], ...]
"""What is known of each worker, by its name."""
_name = itemgetter(0)


def with_name(names: tuple[str, ...], name: str) -> tuple[str, ...]:
    """The same tuple where the name is in it."""
    place = bisect_left(names, name)
    if names[place : place + 1] == (name,):
        return names
    return (*names[:place], name, *names[place:])


def without_name(names: tuple[str, ...], name: str) -> tuple[str, ...]:
    """The same tuple where the name isn't in it."""
    place = bisect_left(names, name)
    return (*names[:place], *names[place + 1 :]) if names[place : place + 1] == (name,) else names


def entry(entries: Entries[T], name: str) -> T | None:
    place = bisect_left(entries, name, key=_name)
    return entries[place][1] if place < len(entries) and entries[place][0] == name else None


def with_entry(entries: Entries[T], name: str, value: T) -> Entries[T]:
    """With one entry of a name, in the place of the one before."""
    place = bisect_left(entries, name, key=_name)
    after = place + (place < len(entries) and entries[place][0] == name)
    return (*entries[:place], (name, value), *entries[after:])


def without_entry(entries: Entries[T], name: str) -> Entries[T]:
    place = bisect_left(entries, name, key=_name)
    there = place < len(entries) and entries[place][0] == name
    return (*entries[:place], *entries[place + 1 :]) if there else entries
