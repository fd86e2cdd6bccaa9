"""States of optimizers are cut with their parameter, or the cut is refused with the reason."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.geometry.box import Box, tiles
from elastic_train.geometry.layout import Sharded, boxes
from elastic_train.geometry.state_layout import (
    Blockwise,
    Coupled,
    Elementwise,
    Projection,
    Scalar,
    follow,
    kinds,
    misfit,
)

pytestmark = pytest.mark.ring0

SHAPES = st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple)


@given(shape=SHAPES, ranks=st.integers(1, 5), dim=st.integers(0, 2))
def test_a_projection_is_what_it_would_be_of_the_part(shape: tuple[int, ...], ranks: int, dim: int) -> None:
    dim = min(dim, len(shape) - 1)
    numbers = np.random.default_rng(0).integers(-99, 99, shape)  # sums are exact in any order
    kept = tuple(d for d in range(len(shape)) if d != dim)
    statistics = numbers.sum(axis=dim)
    for rank in range(ranks):
        for box in boxes(shape, (ranks,), (rank,), (Sharded(kept[0] if kept else 0),)):
            part = follow(Projection(kept), shape, statistics.shape, box)
            assert isinstance(part, Box)
            if kept:  # else the summed dim is the one that is cut
                np.testing.assert_array_equal(statistics[part.slices], numbers[box.slices].sum(axis=dim))


@given(shape=SHAPES, ranks=st.integers(1, 5), size=st.sampled_from([2, 4, 8]))
def test_blocks_are_held_whole_or_the_cut_is_refused(shape: tuple[int, ...], ranks: int, size: int) -> None:
    count = -(-math.prod(shape) // size)
    found: list[Box] = []
    for rank in range(ranks):
        for box in boxes(shape, (ranks,), (rank,), (Sharded(0),)):
            start = int(np.ravel_multi_index(box.offsets, shape))
            stop = start + box.numel
            scales = follow(Blockwise(size, 1), shape, (count,), box)
            codes = follow(Blockwise(size, size), shape, shape, box)
            if start % size or (stop % size and stop != math.prod(shape)):
                assert isinstance(scales, str)
                assert isinstance(codes, str)
                assert f"blocks of {size} elements" in scales
                return
            assert codes == box
            assert isinstance(scales, Box)
            found.append(scales)
    assert tiles(found, Box.whole((count,)))


def test_the_places_where_blocks_can_be_cut_are_named() -> None:
    problem = follow(Blockwise(256, 1), (64, 32), (8,), Box((0, 0), (12, 32)))
    assert problem == "it is in blocks of 256 elements; rows can be cut in multiples of 8"
    assert isinstance(follow(Blockwise(256, 1), (64, 32), (8,), Box((16, 0), (48, 32))), Box)
    columns = follow(Blockwise(256, 1), (64, 32), (8,), Box((0, 0), (64, 16)))
    assert isinstance(columns, str)
    assert "goes through the rows" in columns


def test_what_goes_with_the_whole_parameter_is_never_cut() -> None:
    assert follow(Coupled(), (4, 4), (7,), Box.whole((4, 4))) == Box.whole((7,))
    assert isinstance(follow(Coupled(), (4, 4), (7,), Box((0, 0), (2, 4))), str)
    assert follow(Scalar(), (4, 4), (256,), Box((0, 0), (2, 4))) == Box.whole((256,))


def test_kinds_are_told_by_shapes_and_by_names_only_where_shapes_do_not_tell() -> None:
    f = "float32"
    torch = {"row_var": (f, (8, 1)), "col_var": (f, (1, 6))}
    assert kinds((8, 6), torch) == {"row_var": Projection((0, None)), "col_var": Projection((None, 1))}
    flat = {"exp_avg_sq_row": (f, (8,)), "exp_avg_sq_col": (f, (6,)), "exp_avg": (f, (8, 6))}
    assert kinds((8, 6), flat) == {
        "exp_avg_sq_row": Projection((0,)),
        "exp_avg_sq_col": Projection((1,)),
        "exp_avg": Elementwise(),
    }
    square = {"exp_avg_sq_row": (f, (8,)), "exp_avg_sq_col": (f, (8,)), "other": (f, (8,)), "n": (f, ())}
    assert kinds((8, 8), square) == {
        "exp_avg_sq_row": Projection((0,)),
        "exp_avg_sq_col": Projection((1,)),
        "other": Coupled(),
        "n": Scalar(),
    }
    eight = {"state1": ("uint8", (8, 64)), "absmax1": (f, (2,)), "qmap1": (f, (256,))}
    assert kinds((8, 64), eight) == {
        "state1": Blockwise(256, 256),
        "absmax1": Blockwise(256, 1),
        "qmap1": Scalar(),
    }


@pytest.mark.parametrize(
    ("kind", "own"),
    [
        (Elementwise(), (8,)),
        (Projection((1,)), (8,)),
        (Projection((5,)), (8,)),
        (Blockwise(16, 1), (4,)),
        (Blockwise(0, 0), (3,)),
        (Blockwise(16, 32), (6,)),
    ],
)
def test_a_kind_that_the_shape_contradicts_is_found(kind: Elementwise, own: tuple[int, ...]) -> None:
    assert misfit(kind, (8, 6), own)
