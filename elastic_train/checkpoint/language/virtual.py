"""Virtual tensors: boxes of other tensors put together, and the box algebra of every operation.

A tile says where a box of the virtual tensor comes from: its first element is `origin` in the source, and a
step along dim d of the tile is a step along dim `axes[d]` of the source (None: the source has no such dim and
the tile has size 1 there). So each tile is an affine map, and so is any sequence of operations on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from elastic_train.geometry.box import Box


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """A place in a stored tensor. With several `parts` the value is their mean."""

    parts: tuple[int, ...]
    tensor: str
    state: str
    origin: tuple[int, ...]
    axes: tuple[int | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """A box of the virtual tensor and where it comes from; None: zeros."""

    box: Box
    source: Origin | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Virtual:
    """A tensor that exists nowhere: tiles without overlap or gap, then casts, one after the other.

    `stored` is the dtype of all its sources.
    """

    shape: tuple[int, ...]
    stored: str
    tiles: tuple[Tile, ...]
    casts: tuple[str, ...] = ()

    @property
    def dtype(self) -> str:
        return self.casts[-1] if self.casts else self.stored


def source(
    shape: tuple[int, ...], dtype: str, tensor: str, state: str, parts: tuple[int, ...] = (0,)
) -> Virtual:
    """All of a stored tensor."""
    dims = len(shape)
    origin = Origin(parts=parts, tensor=tensor, state=state, origin=(0,) * dims, axes=tuple(range(dims)))
    return Virtual(shape=shape, stored=dtype, tiles=(Tile(box=Box.whole(shape), source=origin),))


def zeros(shape: tuple[int, ...], like: Virtual) -> Virtual:
    """Zeros that can be joined with `like`."""
    return replace(like, shape=shape, tiles=(Tile(box=Box.whole(shape), source=None),))


def cut(tensor: Virtual, box: Box) -> Virtual:
    """A box of a tensor, as a tensor."""
    if not box.numel:  # an empty tensor still needs a tile to tell where it is from
        return replace(tensor, shape=box.sizes, tiles=_empty(tensor, box))
    found = ((tile, tile.box.intersect(box)) for tile in tensor.tiles)
    tiles = tuple(_moved(tile, both, both.within(box).offsets) for tile, both in found if both is not None)
    return replace(tensor, shape=box.sizes, tiles=tiles)


def concat(tensors: Sequence[Virtual], dim: int) -> Virtual:
    """Tensors one after the other along a dim; their other sizes and their dtypes are equal."""
    tiles: list[Tile] = []
    at = 0
    for tensor in tensors:
        for tile in tensor.tiles:
            offsets = list(tile.box.offsets)
            offsets[dim] += at
            tiles.append(replace(tile, box=Box(tuple(offsets), tile.box.sizes)))
        at += tensor.shape[dim]
    shape = list(tensors[0].shape)
    shape[dim] = at
    return simplify(replace(tensors[0], shape=tuple(shape), tiles=tuple(tiles)))


def permute(tensor: Virtual, order: Sequence[int]) -> Virtual:
    """Dim d of the result is dim `order[d]` of the tensor."""

    def turned(values: Sequence[int]) -> tuple[int, ...]:
        return tuple(values[d] for d in order)

    tiles: list[Tile] = []
    for tile in tensor.tiles:
        at = tile.source
        if at is not None:
            at = replace(at, axes=tuple(at.axes[d] for d in order))
        tiles.append(Tile(box=Box(turned(tile.box.offsets), turned(tile.box.sizes)), source=at))
    return replace(tensor, shape=turned(tensor.shape), tiles=tuple(tiles))


def expand(tensor: Virtual, dim: int) -> Virtual:
    """The tensor with a dim of size 1 put in before `dim`."""

    def wider(values: tuple[int, ...], value: int) -> tuple[int, ...]:
        return (*values[:dim], value, *values[dim:])

    tiles: list[Tile] = []
    for tile in tensor.tiles:
        at = tile.source
        if at is not None:
            at = replace(at, axes=(*at.axes[:dim], None, *at.axes[dim:]))
        tiles.append(Tile(box=Box(wider(tile.box.offsets, 0), wider(tile.box.sizes, 1)), source=at))
    return replace(tensor, shape=wider(tensor.shape, 1), tiles=tuple(tiles))


def squeeze(tensor: Virtual, dim: int) -> Virtual:
    """The tensor without a dim, which must have size 1."""
    assert tensor.shape[dim] == 1

    def less(values: tuple[int, ...]) -> tuple[int, ...]:
        return (*values[:dim], *values[dim + 1 :])

    tiles: list[Tile] = []
    for tile in tensor.tiles:
        at = tile.source
        if at is not None:
            at = replace(at, axes=(*at.axes[:dim], *at.axes[dim + 1 :]))
        tiles.append(Tile(box=Box(less(tile.box.offsets), less(tile.box.sizes)), source=at))
    return replace(tensor, shape=less(tensor.shape), tiles=tuple(tiles))


def simplify(tensor: Virtual) -> Virtual:
    """The same tensor in few tiles: neighbours that are neighbours in their source too become one."""
    tiles = [_canonical(t) for t in tensor.tiles if t.box.numel] or list(tensor.tiles[:1])
    for dim in reversed(range(len(tensor.shape))):
        tiles.sort(key=lambda t: (*_without(t.box.offsets, dim), t.box.offsets[dim]))
        joined: list[Tile] = []
        for tile in tiles:
            if joined and _follows(joined[-1], tile, dim):
                box = joined[-1].box
                sizes = list(box.sizes)
                sizes[dim] += tile.box.sizes[dim]
                joined[-1] = replace(joined[-1], box=Box(box.offsets, tuple(sizes)))
            else:
                joined.append(tile)
        tiles = joined
    return replace(tensor, tiles=tuple(sorted(tiles, key=lambda t: t.box.offsets)))


def place(at: Origin, tile: Box, part: Box) -> tuple[int, ...]:
    """Where the first element of `part` of the tile is in the source."""
    origin = list(at.origin)
    for dim, axis in enumerate(at.axes):
        if axis is not None:
            origin[axis] += part.offsets[dim] - tile.offsets[dim]
    return tuple(origin)


def source_box(at: Origin, tile: Box, part: Box) -> Box:
    """The box of the source that `part` of the tile comes from."""
    sizes = [1] * len(at.origin)
    for dim, axis in enumerate(at.axes):
        if axis is not None:
            sizes[axis] = part.sizes[dim]
    return Box(place(at, tile, part), tuple(sizes))


def _moved(tile: Tile, part: Box, offsets: tuple[int, ...]) -> Tile:
    at = tile.source
    if at is not None:
        at = replace(at, origin=place(at, tile.box, part))
    return Tile(box=Box(offsets, part.sizes), source=at)


def _empty(tensor: Virtual, box: Box) -> tuple[Tile, ...]:
    return tuple(Tile(box=Box((0,) * len(box.sizes), box.sizes), source=t.source) for t in tensor.tiles[:1])


def _without(values: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return (*values[:dim], *values[dim + 1 :])


def _canonical(tile: Tile) -> Tile:
    """The tile with as many of the source's dims followed as can be, first to first: with size 1 it is the
    same.
    """
    at = tile.source
    if at is None or None not in at.axes:
        return tile
    free = iter([s for s in range(len(at.origin)) if s not in at.axes])
    return replace(
        tile, source=replace(at, axes=tuple(next(free, None) if a is None else a for a in at.axes))
    )


def _follows(first: Tile, second: Tile, dim: int) -> bool:
    a, b = first.box, second.box
    if a.offsets[dim] + a.sizes[dim] != b.offsets[dim]:
        return False
    if _without(a.offsets, dim) != _without(b.offsets, dim) or _without(a.sizes, dim) != _without(
        b.sizes, dim
    ):
        return False
    if first.source is None or second.source is None:
        return first.source is second.source
    axis = first.source.axes[dim]
    if axis is None:
        return False
    origin = list(first.source.origin)
    origin[axis] += a.sizes[dim]
    return replace(first.source, origin=tuple(origin)) == second.source
