"""Which node holds the copies of which: in another failure domain where there is one, on a standby first."""

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
    found = {node: _round(node, working if len(working) > 1 else ring, domains) for node in ring}
    taken = Counter[str]()
    for node in working:
        apart = [other for other in spare if domains[other] != domains[node] and taken[other] < PER_STANDBY]
        if apart:
            nearest = min(apart, key=lambda other: taken[other])
            taken[nearest] += 1
            found[node] = tuple(dict.fromkeys((nearest, *found[node])))
    return found


def _round(node: str, ring: list[str], domains: Mapping[str, str]) -> tuple[str, ...]:
    at = ring.index(node) if node in ring else 0
    start = at + max(len(ring) // 2, 1)
    others = [ring[(start + step) % len(ring)] for step in range(len(ring))]
    others = [other for other in others if other != node]
    apart = [other for other in others if domains[other] != domains[node]]
    return tuple((apart or others)[:1])
