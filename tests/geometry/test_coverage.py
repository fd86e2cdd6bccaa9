"""Which elements a table of fragments holds."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_train.geometry.box import Box, tiles
from elastic_train.geometry.coverage import Surplus, Tangled, Uncovered, uncovered, untiled, whole
from elastic_train.geometry.fragments import Fragments
from elastic_train.geometry.layout import flat_range_boxes

pytestmark = pytest.mark.ring0

SHAPES = {"scale": (), "bias": (6,), "weight": (5, 4), "kernel": (3, 2, 3), "none": (0, 2)}


@st.composite
def tables(draw: st.DrawFn) -> Fragments:
    rows = []
    for name in draw(st.lists(st.sampled_from(sorted(SHAPES)), max_size=8)):
        shape = SHAPES[name]
        spans = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
        box = Box(tuple(low for low, _ in spans), tuple(high - low for low, high in spans))
        rows.append((name, "param", "float32", shape, box))
    return Fragments.of(rows)


def counts(table: Fragments) -> dict[str, np.ndarray]:
    found = {name: np.zeros(shape, dtype=np.int64) for name, shape in SHAPES.items()}
    for row in range(len(table)):
        found[table.names[table.key[row]][0]][table.box(row).slices] += 1
    return found


@settings(deadline=None, derandomize=True, max_examples=120)
@given(tables(), tables())
def test_what_is_uncovered_is_what_is_needed_and_not_held(needs: Fragments, haves: Fragments):
    needed, held = counts(needs), counts(haves)
    gaps = uncovered(needs, haves)
    missing = counts(gaps.fragments) if gaps else counts(Fragments.of([]))
    for name in SHAPES:
        assert missing[name].tolist() == ((needed[name] > 0) & (held[name] == 0)).astype(int).tolist()


@settings(deadline=None, derandomize=True, max_examples=120)
@given(tables())
def test_a_table_is_a_tiling_exactly_when_each_tensors_boxes_tile_it(table: Fragments):
    held = counts(table)
    expected = True
    for name, _ in table.names:
        boxes = [table.box(i) for i in range(len(table)) if table.names[table.key[i]][0] == name]
        expected &= tiles(boxes, Box.whole(SHAPES[name]))
    problem = untiled(table)
    assert (problem is None) == expected
    if isinstance(problem, Surplus):
        twice = counts(problem.fragments)
        assert all(twice[n].tolist() == (held[n] > 1).astype(int).tolist() for n in SHAPES)


def test_gaps_are_named_by_tensor_and_state_as_few_boxes():
    shape = (6, 4)
    table = Fragments.of(
        ("w", state, "float32", shape, Box((row, 0), (1, 4)))
        for state, rows in (("param", range(6)), ("exp_avg", (0, 1, 5)))
        for row in rows
    )
    gaps = untiled(table)
    assert isinstance(gaps, Uncovered)
    assert gaps.boxes == {("w", "exp_avg"): (Box((2, 0), (3, 4)),)}
    assert str(gaps) == "nobody holds w (exp_avg) [2:5, 0:4]"


def test_a_box_that_reaches_out_of_its_tensor_is_surplus():
    rows = [
        ("w", "param", "float32", (4,), Box((0,), (4,))),
        ("w", "param", "float32", (4,), Box((4,), (2,))),
    ]
    problem = untiled(Fragments.of(rows))
    assert isinstance(problem, Surplus)
    assert problem.boxes == {("w", "param"): (Box((4,), (2,)),)}


def test_many_gaps_are_listed_shortly():
    rows = [(f"w{i}", "param", "float32", (2,), Box((0,), (1,))) for i in range(9)]
    assert str(untiled(Fragments.of(rows))).endswith("w2 (param) [1:2] and 6 more")


def test_flat_shards_of_one_matrix_are_checked_without_cutting_it_into_elements():
    # Ragged flat ranges: their edges in the last dim all differ, their boxes touch but never overlap.
    shape, shards = (4096, 4096), 800
    edges = np.linspace(0, shape[0] * shape[1], shards + 1).astype(int).tolist()
    table = Fragments.of(
        ("w", "param", "float32", shape, box)
        for start, stop in itertools.pairwise(edges)
        for box in flat_range_boxes(shape, start, stop)
    )
    assert untiled(table) is None
    assert isinstance(untiled(table.take(np.arange(len(table)) != 700)), Uncovered)
    assert len(whole(table)) == 1


def test_boxes_that_cut_each_other_in_every_way_are_not_told_apart() -> None:
    """100,000 boxes of 200,000 elements, each one further than the one before: 10 billion cells."""
    count, size = 100_000, 200_000
    offsets = np.arange(count, dtype=np.int64)[:, None]
    fragments = Fragments(
        names=(("w", "param"),),
        dtypes=("int8",),
        shapes=((count + size,),),
        key=np.zeros(count, dtype=np.int32),
        offsets=offsets,
        sizes=np.full((count, 1), size, dtype=np.int64),
    )
    found = untiled(fragments)
    assert isinstance(found, Tangled)
    assert str(found) == "100000 boxes cut each other in too many ways, most of w (param)"
