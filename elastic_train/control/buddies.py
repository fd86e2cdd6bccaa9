"""Which node holds the copies of which: in another failure domain where there is one."""

from __future__ import annotations

from collections.abc import Mapping


def buddies(domains: Mapping[str, str]) -> dict[str, str]:
    """By node, the node that holds its copies; `domains` is each node's failure domain.

    Nodes stand in a ring, those of a domain side by side, and each takes the node half way round, or the next
    one of another domain after it; where there is one domain only, another node of it. A node alone has none.
    """
    ring = sorted(domains, key=lambda node: (domains[node], node))
    found: dict[str, str] = {}
    for at, node in enumerate(ring):
        start = at + max(len(ring) // 2, 1)
        others = [ring[(start + step) % len(ring)] for step in range(len(ring))]
        others = [other for other in others if other != node]
        apart = [other for other in others if domains[other] != domains[node]]
        if others:
            found[node] = (apart or others)[0]
    return found
