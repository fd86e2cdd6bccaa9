"""Transfer plans deliver every needed element exactly once, from the nearest holder."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_train.geometry.box import Box
from elastic_train.geometry.coverage import Uncovered, uncovered
from elastic_train.geometry.fragments import Fragments
from elastic_train.geometry.layout import Placement, Replicated, Sharded, boxes
from elastic_train.geometry.transfer import Transfers, plan_transfer

pytestmark = pytest.mark.ring0

SHAPES = {"scale": (), "bias": (7,), "weight": (5, 4), "kernel": (3, 2, 3), "none": (0, 2)}


def table(*rows: tuple[str, Box], state: str = "param") -> Fragments:
    return Fragments.of((name, state, "float32", SHAPES[name], box) for name, box in rows)


@st.composite
def any_table(draw: st.DrawFn) -> Fragments:
    rows = []
    for name in draw(st.lists(st.sampled_from(sorted(SHAPES)), max_size=6)):
        spans = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in SHAPES[name]]
        rows.append((name, Box(tuple(a for a, _ in spans), tuple(b - a for a, b in spans))))
    return table(*rows)


def held(ranks: int, placement: Placement) -> list[Fragments]:
    """What each of `ranks` ranks holds of every tensor under one placement."""
    return [
        table(
            *(
                (name, box)
                for name, shape in SHAPES.items()
                for box in boxes(shape, (ranks,), (rank,), (placement if shape else Replicated(),))
            )
        )
        for rank in range(ranks)
    ]


def check_delivery(
    plan: Transfers,
    needs: list[Fragments],
    haves: list[Fragments],
    need_nodes: list[str],
    have_nodes: list[str],
    same: dict[int, int],
) -> None:
    """Copy by the plan and compare with the tensors; check that each box came from the nearest holder."""
    logical = {
        name: np.arange(math.prod(shape)).reshape(shape) + 1000 * i
        for i, (name, shape) in enumerate(SHAPES.items())
    }
    source = [[logical[f.names[f.key[i]][0]][f.box(i).slices] for i in range(len(f))] for f in haves]
    target = [[np.zeros(f.box(i).sizes, dtype=np.int64) for i in range(len(f))] for f in needs]
    times = [[np.zeros(f.box(i).sizes, dtype=np.int64) for i in range(len(f))] for f in needs]
    for row in range(len(plan)):
        rank, holder = int(plan.rank[row]), int(plan.holder[row])
        need, have, box = int(plan.need[row]), int(plan.have[row]), plan.box(row)
        name = plan.names[plan.key[row]]
        assert (
            name == needs[rank].names[needs[rank].key[need]] == haves[holder].names[haves[holder].key[have]]
        )
        into = box.within(needs[rank].box(need)).slices
        target[rank][need][into] = source[holder][have][box.within(haves[holder].box(have)).slices]
        times[rank][need][into] += 1
        assert plan.nbytes[row] == 4 * box.numel
        wanted = Fragments.of([(*name, "float32", SHAPES[name[0]], box)])
        near = [h for h, node in enumerate(have_nodes) if node == need_nodes[rank]]
        if holder != same.get(rank):
            if rank in same:
                assert shares_nothing(wanted, haves[same[rank]])
            if holder not in near:
                assert all(shares_nothing(wanted, haves[h]) for h in near)
    for rank, needed in enumerate(needs):
        for i in range(len(needed)):
            assert (times[rank][i] == 1).all()
            expected = logical[needed.names[needed.key[i]][0]][needed.box(i).slices]
            assert target[rank][i].tolist() == expected.tolist()


def shares_nothing(wanted: Fragments, have: Fragments) -> bool:
    gaps = uncovered(wanted, have)
    return gaps is not None and int(gaps.fragments.numel.sum()) == int(wanted.numel.sum())


@settings(deadline=None, derandomize=True, max_examples=120)
@given(st.lists(any_table(), max_size=3), st.lists(any_table(), max_size=4), st.data())
def test_every_needed_element_is_delivered_exactly_once_from_the_nearest_holder(
    needs: list[Fragments], haves: list[Fragments], data: st.DataObject
):
    whole = held(1, Replicated())
    haves = haves + whole if data.draw(st.booleans()) else haves
    need_nodes = [data.draw(st.sampled_from("abc")) for _ in needs]
    have_nodes = [data.draw(st.sampled_from("abc")) for _ in haves]
    own = data.draw(st.permutations(range(len(haves))))
    same = {rank: h for rank, h in enumerate(own[: len(needs)]) if data.draw(st.booleans())}
    need_nodes = [have_nodes[same[r]] if r in same else node for r, node in enumerate(need_nodes)]
    plan = plan_transfer(needs, haves, need_nodes=need_nodes, have_nodes=have_nodes, same=same)
    gaps = uncovered(Fragments.concat(needs), Fragments.concat(haves))
    if isinstance(plan, Uncovered):
        assert gaps is not None
        assert plan.boxes == gaps.boxes
        return
    assert gaps is None
    check_delivery(plan, needs, haves, need_nodes, have_nodes, same)


PLACEMENTS = {"replicated": Replicated(), "rows": Sharded(0)}


@pytest.mark.parametrize("before", range(1, 5))
@pytest.mark.parametrize("after", range(1, 5))
@pytest.mark.parametrize("cut", ["replicated", "rows"])
def test_a_group_of_any_size_becomes_one_of_any_size(before: int, after: int, cut: str):
    haves, needs = held(before, PLACEMENTS[cut]), held(after, PLACEMENTS[cut])
    need_nodes, have_nodes = [f"n{r}" for r in range(after)], [f"n{r}" for r in range(before)]
    same = {r: r for r in range(min(before, after))}
    plan = plan_transfer(needs, haves, need_nodes=need_nodes, have_nodes=have_nodes, same=same)
    assert isinstance(plan, Transfers)
    check_delivery(plan, needs, haves, need_nodes, have_nodes, same)
    if cut == "replicated":
        assert all((plan.holder[plan.rank == r] == r).all() for r in same), "survivors copy nothing"


def test_what_nobody_holds_is_named_by_tensor_state_and_box():
    haves = [table(("weight", Box((0, 0), (2, 4)))), table(("weight", Box((3, 0), (2, 4))))]
    needs = [table(("weight", Box((0, 0), (5, 4))), ("bias", Box((0,), (7,))))]
    gaps = plan_transfer(needs, haves, need_nodes=["a"], have_nodes=["a", "b"], same={0: 0})
    assert isinstance(gaps, Uncovered)
    assert gaps.boxes == {
        ("weight", "param"): (Box((2, 0), (1, 4)),),
        ("bias", "param"): (Box((0,), (7,)),),
    }


def test_states_of_one_tensor_are_different_things():
    whole = Box.whole((7,))
    needs, haves = [table(("bias", whole))], [table(("bias", whole), state="exp_avg")]
    gaps = plan_transfer(needs, haves, need_nodes=["a"], have_nodes=["a"], same={0: 0})
    assert isinstance(gaps, Uncovered)
    assert list(gaps.boxes) == [("bias", "param")]


def test_a_box_that_one_holder_has_whole_is_one_transfer_although_others_hold_parts_of_it():
    parts = [table(("weight", Box((r, c), (1, 2)))) for r in range(5) for c in (0, 2)]
    haves = [*parts, table(("weight", Box((0, 0), (5, 4))))]
    nodes = [f"n{i}" for i in range(len(haves))]
    plan = plan_transfer(
        [table(("weight", Box((1, 0), (4, 4))))], haves, need_nodes=["n10"], have_nodes=nodes, same={0: 10}
    )
    assert isinstance(plan, Transfers)
    assert [plan.box(i) for i in range(len(plan))] == [Box((1, 0), (4, 4))]


def layered(layers: int, rows: Box | None) -> Fragments:
    shape = (64, 8)
    box = rows or Box.whole(shape)
    return Fragments.of((f"layers.{i}", "param", "float32", shape, box) for i in range(layers))


def test_peers_serve_about_equally_many_bytes():
    haves = [layered(90, None) for _ in range(3)]
    needs = [*haves, *(layered(90, None) for _ in range(2))]
    plan = plan_transfer(
        needs,
        haves,
        need_nodes=["a", "b", "c", "x", "y"],
        have_nodes=["a", "b", "c"],
        same={0: 0, 1: 1, 2: 2},
    )
    assert isinstance(plan, Transfers)
    moved = plan.rank >= 3
    served = np.bincount(plan.holder[moved], weights=plan.nbytes[moved])
    assert served.sum() == 2 * 90 * 64 * 8 * 4
    assert served.max() - served.min() <= 64 * 8 * 4


def test_joiners_on_a_survivors_node_load_that_node_only():
    haves = [layered(10, None) for _ in range(3)]
    plan = plan_transfer([layered(10, None)], haves, need_nodes=["b"], have_nodes=["a", "b", "b"], same={})
    assert isinstance(plan, Transfers)
    assert np.bincount(plan.holder, minlength=3).tolist() == [0, 5, 5]


def test_the_rows_of_a_rank_are_consecutive():
    haves = held(3, Sharded(0))
    nodes = ["a", "b", "c"]
    plan = plan_transfer(held(2, Sharded(0)), haves, need_nodes=nodes[:2], have_nodes=nodes, same={})
    assert isinstance(plan, Transfers)
    assert [list(plan.rows_of(r)) for r in range(3)] == [
        np.flatnonzero(plan.rank == r).tolist() for r in range(3)
    ]


def shards(world: int, tensors: int, rows: int) -> list[Fragments]:
    """Shards of many equal matrices along dim 0, made as columns."""
    names = tuple((f"layers.{i}", "param") for i in range(tensors))
    edges = np.minimum(-(-rows // world) * np.arange(world + 1), rows)
    return [
        Fragments(
            names=names,
            dtypes=("bfloat16",) * tensors,
            shapes=((rows, 128),) * tensors,
            key=np.arange(tensors, dtype=np.int32),
            offsets=np.tile(np.array([[low, 0]]), (tensors, 1)),
            sizes=np.tile(np.array([[high - low, 128]]), (tensors, 1)),
        )
        for low, high in itertools.pairwise(edges.tolist())
    ]


def test_a_million_fragments_are_planned_as_columns():
    before, after, tensors, rows = 500, 497, 1000, 10_000
    needs, haves = shards(after, tensors, rows), shards(before, tensors, rows)
    plan = plan_transfer(
        needs,
        haves,
        need_nodes=[f"n{r // 8}" for r in range(after)],
        have_nodes=[f"n{r // 8}" for r in range(before)],
        same={r: r for r in range(after)},
    )
    assert isinstance(plan, Transfers)
    assert int(plan.sizes.prod(axis=1).sum()) == tensors * rows * 128
    received = np.bincount(plan.rank, weights=plan.nbytes, minlength=after)
    assert received.tolist() == [float(needs[r].nbytes.sum()) for r in range(after)]
    assert len(plan) < 2.1 * tensors * before
