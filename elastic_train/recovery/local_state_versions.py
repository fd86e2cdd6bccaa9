"""Ways to bring a survivor's local state to a step: as it is, rolled forward, or undone.

A local state may be at two steps at once, where updates run inside backward: then the question is asked for
each parameter. A roll forward is exact to the bit; an undo is exact up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from elastic_train.recovery.evidence import LocalState, Vote

Way = Literal["live", "forward", "undo"]
WAYS: tuple[Way, ...] = ("live", "forward", "undo")
"""The best first."""

REST = ""
"""Stands for all parameters alike, where no update was interrupted."""


def way(local_state: LocalState, name: str, step: int, vote: Vote | None) -> Way | None:
    """How a parameter of a local state gets to `step`, given the vote's outcome; None: not at all."""
    at = local_state.step + (name in local_state.ahead)
    if at == step:
        return "live"
    if at == step - 1 and vote is not None and at == local_state.step:
        has_gradient = local_state.reached == step or name in local_state.kept
        return "forward" if has_gradient else None
    newest = local_state.step + (local_state.ahead != ())
    if at == step + 1 and at == newest and local_state.undoable:
        return "undo"
    return None


def names(local_states: Iterable[LocalState]) -> tuple[str, ...]:
    """What to ask about: each parameter where an update was interrupted, else all of them as one."""
    reported = {name for h in local_states for name in (*h.ahead, *h.kept, *h.behind)}
    return tuple(sorted(reported)) or (REST,)


def steps(local_states: Iterable[LocalState]) -> frozenset[int]:
    """Steps to which some of the local states could get."""
    found: set[int] = set()
    for h in local_states:
        found.add(h.step)
        if h.reached is not None:
            found.add(h.reached)
        if h.ahead or h.kept:
            found.add(h.step + 1)
        if h.undoable and not h.ahead:
            found.add(h.step - 1)
    return frozenset(found)
