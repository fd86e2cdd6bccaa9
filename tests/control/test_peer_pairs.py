"""Copies go to other failure domains, evenly, and to nodes that stand by before others."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.control.peer_pairs import PER_STANDBY, buddies

pytestmark = pytest.mark.ring0
NODES = st.dictionaries(st.text("abcdef", min_size=1, max_size=3), st.sampled_from("xyz"), max_size=9)


@given(NODES, st.data())
def test_a_copy_is_on_another_node_and_in_another_domain_where_there_is_one(
    domains: dict[str, str], data: st.DataObject
) -> None:
    standby = data.draw(st.sets(st.sampled_from(sorted(domains)))) if domains else set[str]()
    found = buddies(domains, standby)
    assert set(found) == set(domains)
    for node, asked in found.items():
        assert (not asked) == (len(domains) == 1)
        assert node not in asked
        assert len(set(asked)) == len(asked) <= 2
        if node not in standby:
            working = {domains[other] for other in domains if other not in standby}
            ring = working if len(set(domains) - standby) > 1 else set(domains.values())
            assert all(domains[buddy] != domains[node] for buddy in asked) or len(ring) == 1


@pytest.mark.parametrize("nodes", [2, 3, 4, 8])
def test_every_node_holds_as_much_as_every_other(nodes: int) -> None:
    alone = {f"n{i}": f"n{i}" for i in range(nodes)}
    racks = {f"n{i}": f"rack{i % 2}" for i in range(2 * nodes)}
    for domains in (alone, racks):
        assert set(Counter(buddies(domains).values()).values()) == {1}


def test_standby_nodes_share_the_copies_of_as_many_nodes_as_their_network_takes() -> None:
    domains = {name: name for name in ("a", "b", "c", "s", "t")}
    assert [buddies(domains, {"s"})[node][0] for node in "abc"] == ["s", "s", "s"]
    assert sorted(buddies(domains, {"s", "t"})[node][0] for node in "abc") == ["s", "s", "t"]
    many = {f"n{i}": f"n{i}" for i in range(PER_STANDBY + 2)} | {"s": "s"}
    first = Counter(asked[0] for node, asked in buddies(many, {"s"}).items() if node != "s")
    assert first["s"] == PER_STANDBY
    assert max(first[node] for node in first if node != "s") == 1


def test_whoever_a_full_standby_refuses_has_its_buddy_of_the_ring_to_ask() -> None:
    domains = {name: name for name in ("a", "b", "c", "s")}
    found = buddies(domains, {"s"})
    assert {asked[1] for node, asked in found.items() if node != "s"} == {"a", "b", "c"}


def test_a_standby_in_the_domain_of_what_it_would_replace_holds_no_copy_of_it() -> None:
    domains = {"a": "rack1", "b": "rack2", "s": "rack1"}
    found = buddies(domains, {"s"})
    assert found["a"] == ("b",)
    assert found["b"] == ("s", "a")


@given(st.lists(st.integers(0, 4), max_size=12))
def test_each_is_where_a_walk_from_half_way_round_first_meets_another_domain(places: list[int]) -> None:
    domains = {f"n{number:02d}": str(place) for number, place in enumerate(places)}
    ring = sorted(domains, key=lambda node: (domains[node], node))
    found = buddies(domains)
    for at, node in enumerate(ring):
        start = at + max(len(ring) // 2, 1)
        walk = [other for step in range(len(ring)) if (other := ring[(start + step) % len(ring)]) != node]
        apart = [other for other in walk if domains[other] != domains[node]]
        assert found[node] == tuple((apart or walk)[:1])
