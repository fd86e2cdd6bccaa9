"""The order in which workers are taken is that of the plain rule, at a cost that grows with their number."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_train.control.spread_over_domains import spread
from elastic_train.control.states import Worker

pytestmark = pytest.mark.ring0


def plainly(others: list[Worker], chosen: list[Worker], domains: dict[str, str], useful: set[str]):
    """The rule itself: always the best of all that are left."""
    chosen, left, found = list(chosen), list(others), []
    while left:
        racks = Counter(domains.get(w.node, "") for w in chosen)
        taken = Counter(w.node for w in chosen)
        best = min(left, key=lambda w: (racks[domains.get(w.node, "")], taken[w.node], w.node not in useful))
        left.remove(best)
        chosen.append(best)
        found.append(best)
    return found


@given(
    places=st.lists(st.integers(0, 7), max_size=24),
    seated=st.integers(0, 8),
    racks=st.lists(st.sampled_from(["", "r1", "r2", "r3"]), min_size=8, max_size=8),
    useful=st.sets(st.integers(0, 7)),
)
@settings(max_examples=200, deadline=None)
def test_workers_are_spread_as_by_the_plain_rule(places, seated, racks, useful):
    workers = [
        Worker(name=f"w{number}", node=f"n{place}", status="ready", since=0.0)
        for number, place in enumerate(places)
    ]
    domains = {f"n{place}": rack for place, rack in enumerate(racks)}
    chosen, others = workers[:seated], workers[seated:]
    near = {f"n{place}" for place in useful}
    assert spread(others, chosen, domains, near) == plainly(others, chosen, domains, near)
