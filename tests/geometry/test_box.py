"""Boxes, and the invariant that they tile a tensor."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_train.geometry.box import Box, tiles

pytestmark = pytest.mark.ring0


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    spans = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    return Box(tuple(low for low, _ in spans), tuple(high - low for low, high in spans))


@st.composite
def shape_and_boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A tensor with random boxes in it, or a grid of boxes that tiles it, perhaps with one box spoilt."""
    shape = tuple(draw(st.lists(st.integers(1, 4), max_size=3)))
    if draw(st.booleans()):
        return shape, draw(st.lists(boxes_in(shape), max_size=5))
    edges = [sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=2))}) for n in shape]
    spans = [list(itertools.pairwise(e)) for e in edges]
    grid = [
        Box(tuple(a for a, _ in cell), tuple(b - a for a, b in cell)) for cell in itertools.product(*spans)
    ]
    spoilt = draw(st.sampled_from(["none", "repeat", "drop"]))
    at = draw(st.integers(0, len(grid) - 1))
    return shape, {"none": grid, "repeat": [*grid, grid[at]], "drop": grid[:at] + grid[at + 1 :]}[spoilt]


@settings(deadline=None, derandomize=True, max_examples=120)
@given(shape_and_boxes())
def test_tiles_holds_exactly_when_every_element_is_counted_once(given_: tuple[tuple[int, ...], list[Box]]):
    shape, found = given_
    count = np.zeros(shape, dtype=np.int64)
    for box in found:
        count[box.slices] += 1
    assert tiles(found, Box.whole(shape)) == bool((count == 1).all())


@settings(deadline=None, derandomize=True)
@given(st.data())
def test_the_intersection_of_two_boxes_is_the_elements_of_both(data: st.DataObject):
    shape = tuple(data.draw(st.lists(st.integers(1, 5), max_size=3)))
    a, b = data.draw(boxes_in(shape)), data.draw(boxes_in(shape))
    count = np.zeros(shape, dtype=np.int64)
    count[a.slices] += 1
    count[b.slices] += 1
    both = a.intersect(b)
    assert ((count == 2).sum()) == (both.numel if both else 0)
    if both:
        assert (count[both.slices] == 2).all()


def test_a_box_outside_the_tensor_is_no_part_of_a_tiling():
    assert not tiles([Box((0,), (2,)), Box((3,), (2,))], Box.whole((4,)))


def test_a_scalar_is_tiled_by_one_box_and_not_by_two():
    assert tiles([Box((), ())], Box.whole(()))
    assert not tiles([Box((), ()), Box((), ())], Box.whole(()))


def test_an_empty_tensor_is_tiled_by_nothing_and_by_empty_boxes():
    assert tiles([], Box.whole((0, 3)))
    assert tiles([Box((0, 0), (0, 3))], Box.whole((0, 3)))


def test_a_box_within_another_counts_from_its_corner():
    assert Box((4, 2), (1, 2)).within(Box((3, 0), (4, 4))) == Box((1, 2), (1, 2))


def test_five_thousand_shards_along_the_last_dim_are_checked_without_comparing_all_pairs():
    shards = [Box((0, i), (3, 1)) for i in range(5000)]
    assert tiles(shards, Box.whole((3, 5000)))
