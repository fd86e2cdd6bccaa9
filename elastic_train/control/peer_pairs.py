"""Pair peer stores: which node keeps copies of which, across failure domains, standbys first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

PER_STANDBY = 4
"""Nodes that a standby holds copies of: each snapshot of theirs goes through its one link to the network."""


def buddies(domains: Mapping[str, str], standby: Collection[str] = ()) -> dict[str, tuple[str, ...]]:
    """By node, who is asked to hold its copies, in this order; `domains` is each node's failure domain.

    A node of `standby` comes first, as whoever replaces a lost rank then has its state at hand; up to
    `PER_STANDBY` nodes share one, and none in the domain of what it would replace. Then nodes stand in a
    ring, those of a domain side by side, and each takes the node half way round, or the next one of another
    domain after it; where there is one domain only, another node of it. A node alone has none.
    """
    ring = sorted(domains, key=lambda node: (domains[node], node))
    working = [node for node in ring if node not in standby]
    spare = [node for node in ring if node in standby]
    halfway = _Ring(working if len(working) > 1 else ring, domains)
    found = {node: halfway.of(node) for node in ring}
    taken = Counter[str]()
    for node in working:
        apart = [other for other in spare if domains[other] != domains[node] and taken[other] < PER_STANDBY]
        if apart:
            nearest = min(apart, key=lambda other: taken[other])
            taken[nearest] += 1
            found[node] = tuple(dict.fromkeys((nearest, *found[node])))
    return found


class _Ring:
    """Nodes side by side by their domains, so that where a domain ends is looked up and not walked to."""

    def __init__(self, ring: list[str], domains: Mapping[str, str]) -> None:
        self._ring, self._domains = ring, domains
        self._at = {node: at for at, node in enumerate(ring)}
        self._ends = {domains[node]: at + 1 for at, node in enumerate(ring)}  # by domain

    def of(self, node: str) -> tuple[str, ...]:
        """The node half way round, or the next one of another domain after it, or just another one."""
        start, own = self._at.get(node, 0) + max(len(self._ring) // 2, 1), self._domains[node]
        found = self._node(start)
        if self._domains[found] == own:
            found = self._node(self._ends[own])
        if self._domains[found] == own:  # there is no other
            found = self._node(start) if self._node(start) != node else self._node(start + 1)
        return () if found == node else (found,)

    def _node(self, at: int) -> str:
        return self._ring[at % len(self._ring)]
