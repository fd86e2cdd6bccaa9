"""How what a survivor holds gets to a step: it is there, it rolls forward, or it goes back by an undo.

A holding may be at two steps at once, where updates run inside backward: then the question is asked for each
parameter. A roll forward is exact to the bit; an undo is exact up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from elastic_train.recovery.evidence import Holding, Vote

Way = Literal["live", "forward", "undo"]
WAYS: tuple[Way, ...] = ("live", "forward", "undo")
"""The best first."""

REST = ""
"""Stands for all parameters alike, where no update was interrupted."""


def way(holding: Holding, name: str, step: int, vote: Vote | None) -> Way | None:
    """How a parameter of a holding gets to `step`, given the outcome of the vote on it; None: not at all."""
    at = holding.step + (name in holding.ahead)
    if at == step:
        return "live"
    if at == step - 1 and vote is not None and at == holding.step:
        has_gradient = holding.reached == step or name in holding.kept
        return "forward" if has_gradient else None
    newest = holding.step + (holding.ahead != ())
    if at == step + 1 and at == newest and holding.undoable:
        return "undo"
    return None


def names(holdings: Iterable[Holding]) -> tuple[str, ...]:
    """What to ask about: each parameter where an update was interrupted, else all of them as one."""
    told = {name for h in holdings for name in (*h.ahead, *h.kept, *h.behind)}
    return tuple(sorted(told)) or (REST,)


def steps(holdings: Iterable[Holding]) -> frozenset[int]:
    """Steps to which some of the holdings could get."""
    found: set[int] = set()
    for h in holdings:
        found.add(h.step)
        if h.reached is not None:
            found.add(h.reached)
        if h.ahead or h.kept:
            found.add(h.step + 1)
        if h.undoable and not h.ahead:
            found.add(h.step - 1)
    return frozenset(found)
