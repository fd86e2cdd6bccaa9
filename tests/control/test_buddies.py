"""Copies go to other failure domains, evenly."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.control.buddies import buddies

pytestmark = pytest.mark.ring0


@given(st.dictionaries(st.text("abcdef", min_size=1, max_size=3), st.sampled_from("xyz"), max_size=9))
def test_a_copy_is_on_another_node_and_in_another_domain_where_there_is_one(domains: dict[str, str]) -> None:
    found = buddies(domains)
    assert set(found) == (set(domains) if len(domains) > 1 else set())
    for node, buddy in found.items():
        assert buddy != node
        assert domains[buddy] != domains[node] or len(set(domains.values())) == 1


@pytest.mark.parametrize("nodes", [2, 3, 4, 8])
def test_every_node_holds_as_much_as_every_other(nodes: int) -> None:
    alone = {f"n{i}": f"n{i}" for i in range(nodes)}
    racks = {f"n{i}": f"rack{i % 2}" for i in range(2 * nodes)}
    for domains in (alone, racks):
        assert set(Counter(buddies(domains).values()).values()) == {1}
