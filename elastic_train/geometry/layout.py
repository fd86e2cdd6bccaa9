"""Layouts: the boxes a rank holds of a tensor that is placed on a mesh or cut out of a flat buffer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from elastic_train.geometry.box import Box


@dataclass(frozen=True, slots=True)
class Replicated:
    """Every rank along the mesh axis holds the same."""


@dataclass(frozen=True, slots=True)
class Sharded:
    """The ranks along the mesh axis hold the chunks of one dim, as `torch.chunk` cuts it."""

    dim: int


@dataclass(frozen=True, slots=True)
class StridedSharded:
    """A dim that axes further right cut first; this axis cuts what they left (FSDP over tensor parallelism).

    `split_factor` is the product of the sizes of those axes.
    """

    dim: int
    split_factor: int


Placement = Replicated | Sharded | StridedSharded


def boxes(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Placement],
) -> tuple[Box, ...]:
    """What the rank at `coordinate` holds: one box, or none where its shard is empty.

    Uneven dims follow `torch.chunk`: chunks of ceil(n / ranks), the last ones shorter or empty. Plain shards
    are applied first and strided ones last, the order in which the tensors are really cut; from left to
    right, as a mesh is read, sizes come out wrong where both cuts are uneven.
    """
    assert len(mesh_shape) == len(coordinate) == len(placements)
    offsets, sizes = [0] * len(shape), list(shape)
    axes = list(zip(mesh_shape, coordinate, placements, strict=True))
    for ranks, at, placement in axes:
        if isinstance(placement, Sharded):
            _chunk(offsets, sizes, placement.dim, ranks, at)
    for axis, (ranks, at, placement) in enumerate(axes):
        if isinstance(placement, StridedSharded):
            inner = (
                size
                for size, _, other in axes[axis + 1 :]
                if not isinstance(other, Replicated) and other.dim == placement.dim
            )
            assert math.prod(inner) == placement.split_factor, f"{placements} is no order of cuts we know"
            _chunk(offsets, sizes, placement.dim, ranks, at)
    box = Box(tuple(offsets), tuple(sizes))
    return (box,) if box.numel else ()


def flat_range_boxes(shape: Sequence[int], start: int, stop: int) -> tuple[Box, ...]:
    """The elements start .. stop - 1 of a tensor in row-major order, as boxes in that order.

    At most 2 * ndim - 1: a ragged head and a ragged tail per dim around one whole block.
    """
    assert 0 <= start <= stop <= math.prod(shape)
    if start == stop:
        return ()
    if not shape:
        return (Box((), ()),)
    rows, rest = shape[0], tuple(shape[1:])
    stride = math.prod(rest)
    first, head = divmod(start, stride)
    last, tail = divmod(stop, stride)
    if head and first == last:
        return _under(first, flat_range_boxes(rest, head, tail))
    found: tuple[Box, ...] = ()
    if head:
        found += _under(first, flat_range_boxes(rest, head, stride))
        first += 1
    if last > first:
        found += (Box((first, *(0,) * len(rest)), (last - first, *rest)),)
    if tail:
        assert last < rows
        found += _under(last, flat_range_boxes(rest, 0, tail))
    return found


def _under(row: int, inner: tuple[Box, ...]) -> tuple[Box, ...]:
    """Boxes of one row's tensor as boxes of the tensor."""
    return tuple(Box((row, *b.offsets), (1, *b.sizes)) for b in inner)


def _chunk(offsets: list[int], sizes: list[int], dim: int, ranks: int, at: int) -> None:
    """Narrow one dim to its chunk number `at` of `ranks`."""
    size = -(-sizes[dim] // ranks)
    start = min(size * at, sizes[dim])
    offsets[dim] += start
    sizes[dim] = min(size, sizes[dim] - start)
