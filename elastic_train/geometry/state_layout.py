"""How optimizer state is cut when its parameter is: kinds of states, and the boxes that go together.

Most states have an element for each of the parameter's. Those that haven't can be cut along some dims, at
some places, or not at all, and a cut that they can't follow is refused with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from elastic_train.geometry.box import Box
from elastic_train.geometry.layout import flat_range_boxes

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Elementwise:
    """An element for each of the parameter's: it is cut where that is."""


@dataclass(frozen=True, slots=True)
class Scalar:
    """The same for every part of the parameter, and never cut: a counter, a table of codes."""


@dataclass(frozen=True, slots=True)
class Projection:
    """Statistics over some dims (Adafactor, Shazeer and Stern 2018): dim i of the state is `dims[i]` of the
    parameter, or None where a dim of size 1 stands for one that was summed over.
    """

    dims: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Blockwise:
    """`each` elements for every `size` elements of the parameter in row-major order (8-bit optimizers,
    Dettmers et al. 2022): codes have each = size, scales each = 1. It is cut between blocks alone.
    """

    size: int
    each: int


@dataclass(frozen=True, slots=True)
class Coupled:
    """Means something only beside the whole parameter (the factors of Shampoo): neither is ever cut."""


Kind = Elementwise | Scalar | Projection | Blockwise | Coupled


def follow(kind: Kind, shape: Shape, own: Shape, box: Box) -> Box | str:
    """The box of a state of shape `own` that goes with a box of its parameter, or why there is none."""
    whole = Box.whole(own)
    match kind:
        case Elementwise():
            return box
        case Scalar():
            return whole
        case Projection(dims):
            return Box(
                tuple(0 if d is None else box.offsets[d] for d in dims),
                tuple(1 if d is None else box.sizes[d] for d in dims),
            )
        case Blockwise(size, each):
            return _blocks(size, each, shape, own, box)
        case Coupled():
            return whole if box == Box.whole(shape) else "it goes with the whole parameter and is never cut"


def misfit(kind: Kind, shape: Shape, own: Shape) -> str | None:
    """Why a state of shape `own` can't be of this kind, None if it can."""
    match kind:
        case Elementwise() if own != shape:
            return f"an elementwise state has the parameter's shape {list(shape)}"
        case Projection(dims):
            known = all(d is None or 0 <= d < len(shape) for d in dims)
            if not known or own != tuple(1 if d is None else shape[d] for d in dims):
                return f"a projection over dims {list(dims)} of {list(shape)} has another shape"
        case Blockwise(size, each):
            blocks = -(-math.prod(shape) // size) if size > 0 else 0
            most = blocks * each
            short = each == size and math.prod(own) == math.prod(shape)
            if not 0 < each <= size or not (short or math.prod(own) == most):
                return f"{blocks} blocks of {size} elements have {most} elements of it"
        case _:
            pass
    return None


def kinds(shape: Shape, states: Mapping[str, tuple[str, Shape]]) -> dict[str, Kind]:
    """The kinds of a parameter's states, by name -> (dtype, shape), where the document names none.

    Shapes decide. Where a statistic could be of several dims, its name does if it is one that Adafactor's
    implementations use; what matches none of them is coupled, which is refused rather than cut wrongly.
    """
    found = {name: _kind(name, shape, own) for name, (_, own) in states.items()}
    for name, (dtype, own) in states.items():
        scales = states.get(f"absmax{name.removeprefix('state')}") if name.startswith("state") else None
        if dtype in ("uint8", "int8") and own == shape and scales is not None:
            size = _block_size(math.prod(shape), math.prod(scales[1]))
            number = name.removeprefix("state")
            if size:
                found[name], found[f"absmax{number}"] = Blockwise(size, size), Blockwise(size, 1)
            if f"qmap{number}" in states:
                found[f"qmap{number}"] = Scalar()
    return found


def _kind(name: str, shape: Shape, own: Shape) -> Kind:
    if own == shape:
        return Elementwise()
    if math.prod(own) == 1:
        return Scalar()
    if len(own) == len(shape) and all(n in (1, full) for n, full in zip(own, shape, strict=True)):
        return Projection(tuple(d if n == shape[d] else None for d, n in enumerate(own)))
    found = _dims(shape, own)
    if len(found) == 1:
        return Projection(found[0])
    last = len(shape) - 1
    for end, dropped in (("_row", last), ("_col", last - 1)):
        dims = tuple(d for d in range(len(shape)) if d != dropped)
        if name.endswith(end) and dims in found:
            return Projection(dims)
    return Coupled()


def _dims(shape: Shape, own: Shape) -> list[tuple[int, ...]]:
    """The ways in which the dims of `own`, in order, are dims of `shape`."""
    if not own:
        return [()]
    return [
        (d, *(d + 1 + rest for rest in others))
        for d, size in enumerate(shape)
        if size == own[0]
        for others in _dims(shape[d + 1 :], own[1:])
    ]


def _block_size(numel: int, scales: int) -> int:
    """The block size that gives this number of scales: 256 and 2048 are in use, others are looked for."""
    sizes = (256, 2048, 128, 64, 512, 1024, 4096, 32)
    return next((size for size in sizes if -(-numel // size) == scales), 0)


def _blocks(size: int, each: int, shape: Shape, own: Shape, box: Box) -> Box | str:
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    start = sum(o * s for o, s in zip(box.offsets, strides, strict=True))
    stop = start + box.numel
    if not box.numel:
        return Box((0,) * len(own), (0,) * len(own))
    if flat_range_boxes(shape, start, stop) != (box,):
        return f"it is in blocks of {size} elements in row-major order, and the cut goes through the rows"
    last = stop == math.prod(shape)
    if start % size or (stop % size and not last):
        rows = math.lcm(size, strides[0]) // strides[0] if shape else 1
        return f"it is in blocks of {size} elements; rows can be cut in multiples of {rows}"
    if own == shape:
        return box
    if len(own) != 1:
        return Box.whole(own) if box == Box.whole(shape) else "its blocks don't follow one another in one dim"
    low, high = start // size * each, -(-stop // size) * each
    return Box((low,), (min(high, own[0]) - low,))
