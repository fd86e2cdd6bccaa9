"""Copies of a part sit apart from each other; survivors stay where they were."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from elastic_train.planner.plan import Mesh, Plan, WorkerSlot, even_shares
from elastic_train.planner.rank_placement import place

pytestmark = pytest.mark.ring0


def slots_on(*nodes: str) -> tuple[WorkerSlot, ...]:
    """One worker slot per letter; "a" and "A" are nodes of one domain."""
    return tuple(
        WorkerSlot(worker=f"w{i}", node=node, domain=f"rack {node.lower()}") for i, node in enumerate(nodes)
    )


def plan_of(worker_slots: tuple[WorkerSlot, ...], mesh: Mesh) -> Plan:
    return Plan(
        mesh=mesh,
        workers=tuple(s.worker for s in worker_slots),
        nodes=tuple(s.node for s in worker_slots),
        shares=even_shares(2 * mesh.dp, mesh.dp),
    )


def parts(ranks: tuple[WorkerSlot, ...], mesh: Mesh) -> list[list[WorkerSlot]]:
    """The worker slots that hold the same shard, by shard."""
    return [list(ranks[shard :: mesh.dp_shard]) for shard in range(mesh.dp_shard)]


def apart(groups: list[list[WorkerSlot]], attribute: str) -> bool:
    return all(len({getattr(s, attribute) for s in group}) == len(group) for group in groups)


@st.composite
def clusters(draw: st.DrawFn) -> tuple[tuple[WorkerSlot, ...], Mesh]:
    mesh = Mesh(dp_replicate=draw(st.integers(1, 4)), dp_shard=draw(st.integers(1, 4)))
    nodes = draw(st.lists(st.sampled_from("aAbBcCde"), min_size=mesh.size, max_size=mesh.size + 4))
    return slots_on(*nodes), mesh


@st.composite
def changes(draw: st.DrawFn) -> tuple[tuple[WorkerSlot, ...], Mesh, Plan]:
    """A plan, and the worker slots that are there after some of its workers went and others came."""
    worker_slots, mesh = draw(clusters())
    before = plan_of(place(worker_slots, mesh), mesh)
    gone = draw(st.sets(st.sampled_from(before.workers)))
    left = tuple(s for s in worker_slots if s.worker in before.workers and s.worker not in gone)
    after = Mesh(dp_replicate=draw(st.integers(1, 4)), dp_shard=draw(st.integers(1, 4)))
    new = draw(st.lists(st.sampled_from("aAbBcCde"), max_size=8))
    joined = tuple(
        WorkerSlot(worker=f"new{i}", node=n, domain=f"rack {n.lower()}") for i, n in enumerate(new)
    )
    assume(len(left) + len(joined) >= after.size)
    return left + joined, after, before


def enough(worker_slots: tuple[WorkerSlot, ...], mesh: Mesh, attribute: str) -> bool:
    """Whether any choice of worker slots could hold every part on distinct nodes (or domains)."""
    per = Counter(getattr(s, attribute) for s in worker_slots)
    return sum(min(n, mesh.dp_shard) for n in per.values()) >= mesh.size


@settings(deadline=None, derandomize=True, max_examples=300)
@given(changes())
def test_copies_are_on_distinct_nodes_and_domains_whenever_there_are_enough(
    change: tuple[tuple[WorkerSlot, ...], Mesh, Plan],
):
    worker_slots, mesh, before = change
    for previous in (None, before):
        ranks = place(worker_slots, mesh, previous)
        assert len(ranks) == len(set(ranks)) == mesh.size
        assert set(ranks) <= set(worker_slots)
        assert place(worker_slots, mesh, previous) == ranks
        for attribute in ("node", "domain"):
            assert not enough(worker_slots, mesh, attribute) or apart(parts(ranks, mesh), attribute)


@settings(deadline=None, derandomize=True, max_examples=150)
@given(
    st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.sets(st.integers(0, 15)), st.integers(0, 16)
)
def test_as_many_survivors_keep_their_shard_as_can(
    copies: int, shards: int, copies_after: int, gone: set[int], joined: int
):
    mesh, after = Mesh(dp_replicate=copies, dp_shard=shards), Mesh(dp_replicate=copies_after, dp_shard=shards)
    worker_slots = tuple(WorkerSlot(worker=f"w{i}", node=f"n{i}") for i in range(mesh.size))
    before = plan_of(worker_slots, mesh)
    left = tuple(s for i, s in enumerate(worker_slots) if i not in gone)
    new = tuple(WorkerSlot(worker=f"new{i}", node=f"m{i}") for i in range(joined))
    assume(len(left) <= after.size <= len(left) + len(new))
    ranks = place(left + new, after, before)
    kept = sum(
        before.workers.index(s.worker) % shards == rank % shards
        for rank, s in enumerate(ranks)
        if s.worker in before.workers
    )
    survivors = Counter(before.workers.index(s.worker) % shards for s in left)
    assert kept == sum(min(n, copies_after) for n in survivors.values())


@pytest.mark.parametrize("gone", range(6))
def test_a_replacement_takes_the_rank_of_the_one_that_went(gone: int):
    mesh = Mesh(dp_replicate=2, dp_shard=3)
    before = plan_of(slots_on(*"abcdef"), mesh)
    after = (*(s for s in slots_on(*"abcdef") if s.worker != f"w{gone}"), WorkerSlot(worker="new", node="g"))
    ranks = place(after, mesh, before)
    assert [s.worker for s in ranks] == ["new" if i == gone else f"w{i}" for i in range(6)]


def test_a_finer_cut_leaves_survivors_the_shards_that_lie_wholly_in_their_own():
    before = plan_of(slots_on(*"ab"), Mesh(dp_shard=2))
    ranks = place(slots_on(*"abc"), Mesh(dp_shard=3), before)
    assert [s.worker for s in ranks] == ["w0", "w2", "w1"]


def test_a_coarser_cut_leaves_each_survivor_the_shard_that_its_own_is_part_of():
    before = plan_of(slots_on(*"abcd"), Mesh(dp_shard=4))
    ranks = place(slots_on(*"abcd"), Mesh(dp_replicate=2, dp_shard=2), before)
    assert [{s.worker for s in part} for part in parts(ranks, Mesh(dp_replicate=2, dp_shard=2))] == [
        {"w0", "w1"},
        {"w2", "w3"},
    ]


def test_a_fresh_group_keeps_the_ranks_of_a_copy_on_one_node():
    ranks = place(slots_on(*"aaabbb"), Mesh(dp_replicate=2, dp_shard=3))
    assert [s.node for s in ranks] == list("aaabbb")


def test_survivors_that_crowd_a_node_give_way_so_that_copies_are_apart():
    # w0 and w2 hold shard 0 and are now on one node: one of them has to move.
    mesh = Mesh(dp_replicate=2, dp_shard=2)
    before = plan_of(slots_on(*"aabb"), mesh)
    worker_slots = (
        WorkerSlot(worker="w0", node="a"),
        WorkerSlot(worker="w2", node="a"),
        *slots_on(*"abcd")[1::2],
    )
    ranks = place(worker_slots, mesh, before)
    assert apart(parts(ranks, mesh), "node")


def test_an_idle_seat_is_the_one_that_would_put_two_copies_on_a_node():
    ranks = place(slots_on("a", "a", "b"), Mesh(dp_replicate=2))
    assert [s.node for s in ranks] == ["a", "b"]


def test_stages_have_their_copies_apart_as_shards_do():
    mesh = Mesh(pp=2, dp_replicate=2)
    ranks = place(slots_on(*"aabb"), mesh)
    by_stage = [[s for r, s in enumerate(ranks) if mesh.coordinate(r)["pp"] == stage] for stage in (0, 1)]
    assert apart(by_stage, "node")
