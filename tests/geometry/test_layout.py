"""From placements and flat ranges to boxes."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_train.geometry.box import Box, tiles
from elastic_train.geometry.layout import (
    Placement,
    Replicated,
    Sharded,
    StridedSharded,
    boxes,
    flat_range_boxes,
)

pytestmark = pytest.mark.ring0


def chunk(array: np.ndarray, ranks: int, at: int, dim: int) -> np.ndarray:
    """What rank `at` gets of `torch.chunk(array, ranks, dim)`, empty where torch gives fewer chunks."""
    size = -(-array.shape[dim] // ranks)
    index = [slice(None)] * array.ndim
    index[dim] = slice(size * at, size * (at + 1))
    return array[tuple(index)]


def ranks_of(mesh: tuple[int, ...]) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(n) for n in mesh)))


@pytest.mark.parametrize("size", [0, 1, 5, 6, 7, 13])
@pytest.mark.parametrize("world", range(1, 9))
def test_shards_of_any_size_tile_the_tensor_in_any_world(size: int, world: int):
    shards = [boxes((size, 2), (world,), (r,), (Sharded(0),)) for r in range(world)]
    assert tiles((b for shard in shards for b in shard), Box.whole((size, 2)))
    whole = np.arange(size * 2).reshape(size, 2)
    for rank, shard in enumerate(shards):
        assert len(shard) <= 1
        held = whole[shard[0].slices] if shard else whole[:0]
        assert held.tolist() == chunk(whole, world, rank, 0).tolist()


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...]]:
    shape = tuple(draw(st.lists(st.integers(0, 7), min_size=1, max_size=3)))
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    plain = st.one_of(st.just(Replicated()), st.builds(Sharded, st.integers(0, len(shape) - 1)))
    placements: list[Placement] = [draw(plain) for _ in mesh]
    first = placements[0]
    if isinstance(first, Sharded) and draw(st.booleans()):
        inner = (n for n, p in zip(mesh, placements, strict=True) if p == first)
        placements[0] = StridedSharded(first.dim, math.prod(inner) // mesh[0])
    return shape, mesh, tuple(placements)


@settings(deadline=None, derandomize=True, max_examples=120)
@given(layouts())
def test_a_rank_holds_its_chunk_of_chunks(
    layout: tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...]],
):
    shape, mesh, placements = layout
    whole = np.arange(math.prod(shape)).reshape(shape)
    in_order = sorted(range(len(mesh)), key=lambda axis: isinstance(placements[axis], StridedSharded))
    for coordinate in ranks_of(mesh):
        expected = whole
        for axis in in_order:
            placement = placements[axis]
            if not isinstance(placement, Replicated):
                expected = chunk(expected, mesh[axis], coordinate[axis], placement.dim)
        found = boxes(shape, mesh, coordinate, placements)
        held = whole[found[0].slices] if found else whole[:0]
        assert len(found) <= 1
        assert held.tolist() == expected.tolist() or expected.size == held.size == 0


@settings(deadline=None, derandomize=True, max_examples=80)
@given(layouts())
def test_ranks_that_are_no_replicas_of_each_other_tile_the_tensor(
    layout: tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...]],
):
    shape, mesh, placements = layout
    firsts = [
        c
        for c in ranks_of(mesh)
        if all(at == 0 for at, p in zip(c, placements, strict=True) if isinstance(p, Replicated))
    ]
    held = [b for c in firsts for b in boxes(shape, mesh, c, placements)]
    assert tiles(held, Box.whole(shape))


def test_fsdp_over_tensor_parallelism_cuts_the_tensor_parallel_shard():
    layout = (StridedSharded(0, 2), Sharded(0))
    # 7 rows: tensor parallel ranks hold rows 0-3 and 4-6; FSDP cuts these into chunks of 2, 2 and 2, 1.
    assert boxes((7,), (2, 2), (0, 0), layout) == (Box((0,), (2,)),)
    assert boxes((7,), (2, 2), (1, 0), layout) == (Box((2,), (2,)),)
    assert boxes((7,), (2, 2), (0, 1), layout) == (Box((4,), (2,)),)
    assert boxes((7,), (2, 2), (1, 1), layout) == (Box((6,), (1,)),)


def test_a_strided_cut_whose_factor_fits_no_axis_is_refused():
    with pytest.raises(AssertionError, match="no order of cuts"):
        boxes((8,), (2, 2), (0, 0), (StridedSharded(0, 3), Sharded(0)))


@settings(deadline=None, derandomize=True, max_examples=120)
@given(st.lists(st.integers(0, 5), max_size=4).map(tuple), st.data())
def test_a_flat_range_is_few_boxes_with_its_elements_in_order(shape: tuple[int, ...], data: st.DataObject):
    numel = math.prod(shape)
    start, stop = sorted((data.draw(st.integers(0, numel)), data.draw(st.integers(0, numel))))
    found = flat_range_boxes(shape, start, stop)
    whole = np.arange(numel).reshape(shape)
    assert [x for b in found for x in whole[b.slices].ravel().tolist()] == list(range(start, stop))
    assert len(found) <= max(1, 2 * len(shape) - 1)
