"""The operations of the language: functions from virtual tensors to virtual tensors, and their inverses.

Each raises ValueError with what doesn't fit. `inverse` is the operation that undoes it, or a sentence that
says why there is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from elastic_train.checkpoint.dtypes import ELEMENTS
from elastic_train.checkpoint.language.cuts import Cuts
from elastic_train.checkpoint.language.virtual import (
    Virtual,
    concat,
    cut,
    expand,
    permute,
    squeeze,
    zeros,
)
from elastic_train.geometry.box import Box

Tensors = Sequence[Virtual]
FLOATING = frozenset(n for n in ELEMENTS if n.startswith(("float", "bfloat")))


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Each tensor into its fused parts, in order."""

    dim: int
    cuts: Cuts

    def apply(self, tensors: Tensors) -> list[Virtual]:
        found: list[Virtual] = []
        for tensor in tensors:
            dim = _dim(tensor, self.dim)
            for intervals in self.cuts.intervals(tensor.shape[dim]):
                found.append(concat([_cut(tensor, dim, start, size) for start, size in intervals], dim))
        return found

    def inverse(self) -> Operation:
        return Fuse(dim=self.dim, cuts=self.cuts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fuse:
    """Parts that follow one another in the list into one tensor; without `cuts` all of them, end to end."""

    dim: int
    cuts: Cuts | None = None

    def apply(self, tensors: Tensors) -> list[Virtual]:
        of = len(tensors) if self.cuts is None else self.cuts.parts
        if of == 0 or len(tensors) % of:
            raise ValueError(f"fuse takes {of} tensors at a time, and there are {len(tensors)}")
        return [self._fused(tensors[i : i + of]) for i in range(0, len(tensors), of)]

    def _fused(self, parts: Tensors) -> Virtual:
        dim = _dim(parts[0], self.dim)
        _joinable(parts, dim)
        if self.cuts is None:
            return concat(parts, dim)
        total = sum(p.shape[dim] for p in parts)
        pieces: list[tuple[int, Virtual]] = []
        for number, (part, intervals) in enumerate(zip(parts, self.cuts.intervals(total), strict=True)):
            wanted = sum(size for _, size in intervals)
            if part.shape[dim] != wanted:
                raise ValueError(
                    f"part {number} has {part.shape[dim]} elements along dim {dim}, not {wanted}"
                )
            at = 0
            for start, size in intervals:
                pieces.append((start, _cut(part, dim, at, size)))
                at += size
        return concat([piece for _, piece in sorted(pieces, key=lambda p: p[0])], dim)

    def inverse(self) -> Operation | str:
        if self.cuts is None:
            return "fuse doesn't say where to cut again; give it parts, sizes or heads"
        return Split(dim=self.dim, cuts=self.cuts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """All tensors of the list, of one shape, along a new dim (experts)."""

    dim: int = 0

    def apply(self, tensors: Tensors) -> list[Virtual]:
        if not 0 <= self.dim <= len(tensors[0].shape):
            raise ValueError(f"a tensor of shape {tensors[0].shape} can't be stacked along dim {self.dim}")
        wide = [expand(t, self.dim) for t in tensors]
        _joinable(wide, self.dim)
        return [concat(wide, self.dim)]

    def inverse(self) -> Operation:
        return Unstack(dim=self.dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unstack:
    """One tensor into its slices along a dim, which goes."""

    dim: int = 0

    def apply(self, tensors: Tensors) -> list[Virtual]:
        if len(tensors) != 1:
            raise ValueError(f"unstack takes one tensor, and there are {len(tensors)}; write another rule")
        dim = _dim(tensors[0], self.dim)
        return [squeeze(_cut(tensors[0], dim, i, 1), dim) for i in range(tensors[0].shape[dim])]

    def inverse(self) -> Operation:
        return Stack(dim=self.dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transpose:
    """Dim d of the result is dim `order[d]`."""

    order: tuple[int, ...]

    def __post_init__(self) -> None:
        if sorted(self.order) != list(range(len(self.order))):
            raise ValueError(f"order {list(self.order)} isn't each dim once")

    def apply(self, tensors: Tensors) -> list[Virtual]:
        for tensor in tensors:
            if len(tensor.shape) != len(self.order):
                raise ValueError(f"order {list(self.order)} doesn't fit the shape {tensor.shape}")
        return [permute(t, self.order) for t in tensors]

    def inverse(self) -> Operation:
        return Transpose(order=tuple(self.order.index(d) for d in range(len(self.order))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Resize:
    """Strip rows at the end of a dim that only fill it up, or pad it with zeros.

    Sizes in elements; None: whatever there is, and then there is no way back.
    """

    dim: int
    before: int | None
    after: int

    def apply(self, tensors: Tensors) -> list[Virtual]:
        found: list[Virtual] = []
        for tensor in tensors:
            dim = _dim(tensor, self.dim)
            now = tensor.shape[dim]
            if self.before is not None and now != self.before:
                raise ValueError(f"dim {dim} has {now} elements, not {self.before}")
            if self.after <= now:
                found.append(_cut(tensor, dim, 0, self.after))
            else:
                shape = list(tensor.shape)
                shape[dim] = self.after - now
                found.append(concat([tensor, zeros(tuple(shape), tensor)], dim))
        return found

    def inverse(self) -> Operation | str:
        if self.before is None:
            return "strip doesn't say how many elements to fill up to; give it `padded`"
        return Resize(dim=self.dim, before=self.after, after=self.before)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cast:
    """Floating tensors as another floating dtype, rounded to nearest, when they are read.

    `back` is the dtype of the other direction; None: there is none.
    """

    dtype: str
    back: str | None = None

    def __post_init__(self) -> None:
        for name in (self.dtype, self.back):
            if name is not None and name not in FLOATING:
                raise ValueError(f"{name!r} is no floating dtype; known: {', '.join(sorted(FLOATING))}")

    def apply(self, tensors: Tensors) -> list[Virtual]:
        for tensor in tensors:
            if tensor.dtype not in FLOATING:
                raise ValueError(f"a tensor of {tensor.dtype} isn't cast; select only floating ones")
        return [t if t.dtype == self.dtype else replace(t, casts=(*t.casts, self.dtype)) for t in tensors]

    def inverse(self) -> Operation | str:
        if self.back is None:
            return "cast doesn't say what to cast back to; give it `back`"
        return Cast(dtype=self.back, back=self.dtype)


Operation = Split | Fuse | Stack | Unstack | Transpose | Resize | Cast


def _dim(tensor: Virtual, dim: int) -> int:
    if not -len(tensor.shape) <= dim < len(tensor.shape):
        raise ValueError(f"a tensor of shape {tensor.shape} has no dim {dim}")
    return dim % len(tensor.shape)


def _cut(tensor: Virtual, dim: int, start: int, size: int) -> Virtual:
    if start + size > tensor.shape[dim]:
        raise ValueError(f"dim {dim} of {tensor.shape} has no elements {start} to {start + size}")
    offsets, sizes = [0] * len(tensor.shape), list(tensor.shape)
    offsets[dim], sizes[dim] = start, size
    return cut(tensor, Box(tuple(offsets), tuple(sizes)))


def _joinable(tensors: Tensors, dim: int) -> None:
    def rest(tensor: Virtual) -> tuple[object, ...]:
        return (*tensor.shape[:dim], *tensor.shape[dim + 1 :]), tensor.stored, tensor.casts

    for tensor in tensors:
        if len(tensor.shape) != len(tensors[0].shape) or rest(tensor) != rest(tensors[0]):
            first, other = tensors[0], tensor
            raise ValueError(
                f"{first.dtype} {list(first.shape)} and {other.dtype} {list(other.shape)} can't be joined "
                f"along dim {dim}"
            )
