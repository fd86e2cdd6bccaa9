"""Boxes: hyper-rectangles of a logical tensor, and the one invariant that they tile it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Box:
    """A block of a tensor: where it starts and how far it reaches, in elements, one number per dim.

    A 0-dim tensor is the box `Box((), ())` with one element; a box with a size of 0 is empty.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """The box that is all of a tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index of this box in an array that holds the whole tensor."""
        return tuple(slice(o, o + s) for o, s in zip(self.offsets, self.sizes, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """The block that both hold, or None where they share no element."""
        offsets = tuple(max(a, b) for a, b in zip(self.offsets, other.offsets, strict=True))
        ends = (
            min(a + n, b + m)
            for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        )
        sizes = tuple(e - o for e, o in zip(ends, offsets, strict=True))
        return Box(offsets, sizes) if all(s > 0 for s in sizes) else None

    def within(self, outer: Box) -> Box:
        """This box in coordinates relative to `outer`, which must contain it."""
        return Box(tuple(a - b for a, b in zip(self.offsets, outer.offsets, strict=True)), self.sizes)


def tiles(boxes: Iterable[Box], whole: Box) -> bool:
    """Whether the boxes hold every element of `whole` exactly once and nothing else."""
    parts = [b for b in boxes if b.numel]
    if any(p.intersect(whole) != p for p in parts):
        return False
    if sum(p.numel for p in parts) != whole.numel:
        return False
    if len(parts) < 2:
        return True
    # Equal volume inside `whole`: they tile it iff no two overlap. Sweep along the dim that is cut most and
    # compare a box only with those that still reach into it.
    dim = max(range(len(whole.sizes)), key=lambda d: len({p.offsets[d] for p in parts}))
    parts.sort(key=lambda b: b.offsets[dim])
    open_: list[Box] = []
    for part in parts:
        open_ = [b for b in open_ if b.offsets[dim] + b.sizes[dim] > part.offsets[dim]]
        if any(b.intersect(part) is not None for b in open_):
            return False
        open_.append(part)
    return True
