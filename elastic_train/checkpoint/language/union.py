"""Union and extract: from the tensors of model-parallel parts to one, and back to the tensor of one part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from elastic_train.checkpoint.language.cuts import Cuts, Equal
from elastic_train.checkpoint.language.operations import FLOATING, Fuse, Split
from elastic_train.checkpoint.language.specification import Union
from elastic_train.checkpoint.language.virtual import Virtual, concat, cut
from elastic_train.geometry.box import Box


def unite(union: Union, parts: Sequence[Virtual]) -> Virtual:
    """One tensor from what the parts hold, in their order; ValueError where they don't fit together."""
    if len(parts) == 1:
        return parts[0]
    match union.kind:
        case "unique":
            raise ValueError(f"{len(parts)} parts hold it; say whether it is replicated, fragment or average")
        case "replicated":
            _same_shape(parts)
            return parts[0]
        case "average":
            _same_shape(parts)
            if parts[0].dtype not in FLOATING:
                raise ValueError(f"a tensor of {parts[0].dtype} has no average")
            (tile,) = parts[0].tiles
            assert tile.source is not None
            holders = tuple(p for t in parts for a in t.tiles if a.source is not None for p in a.source.parts)
            return replace(parts[0], tiles=(replace(tile, source=replace(tile.source, parts=holders)),))
        case "fragment":
            cuts = union.sub_fragments or Equal(1)
            total = sum(p.shape[union.dim] for p in parts)
            widths = _widths(union, cuts, total, [p.shape[union.dim] for p in parts])
            subs: list[Virtual] = []
            for number in range(cuts.parts):
                pieces = [
                    _slice(p, union.dim, sum(widths[s][r] for s in range(number)), widths[number][r])
                    for r, p in enumerate(parts)
                ]
                subs.append(concat(pieces, union.dim))
            (whole,) = Fuse(dim=union.dim, cuts=cuts).apply(subs)
            return whole


def extract(union: Union, tensor: Virtual, part: int, parts: int) -> Virtual | None:
    """What part `part` of `parts` holds of a tensor; None: nothing. The inverse of `unite`."""
    match union.kind:
        case "unique":
            return tensor if part == 0 else None
        case "replicated":
            return tensor
        case "average":
            raise ValueError("an average has no inverse")
        case "fragment":
            cuts = union.sub_fragments or Equal(1)
            total = tensor.shape[union.dim]
            even = [total // parts] * parts
            widths = _widths(union, cuts, total, even)
            subs = Split(dim=union.dim, cuts=cuts).apply([tensor])
            return concat(
                [
                    _slice(sub, union.dim, sum(widths[s][:part]), widths[s][part])
                    for s, sub in enumerate(subs)
                ],
                union.dim,
            )


def _widths(union: Union, cuts: Cuts, total: int, lengths: Sequence[int]) -> list[list[int]]:
    """[sub-fragment][part]: how much of a sub-fragment a part holds along the dim."""
    sizes = [sum(n for _, n in intervals) for intervals in cuts.intervals(total)]
    if union.widths is None:
        if sum(lengths) != total or any(size * n % total for size in sizes for n in lengths if total):
            raise ValueError(
                f"sub-fragments of {sizes} don't divide like parts of {list(lengths)}; give it `widths`"
            )
        return [[size * n // total if total else 0 for n in lengths] for size in sizes]
    given = union.widths if len(union.widths) > 1 else union.widths * len(sizes)
    if [sum(w) for w in given] != sizes or any(len(w) != len(lengths) for w in given):
        raise ValueError(
            f"widths {[list(w) for w in union.widths]} don't make sub-fragments of {sizes} "
            f"in {len(lengths)} parts"
        )
    return [list(w) for w in given]


def _same_shape(parts: Sequence[Virtual]) -> None:
    for part in parts:
        if (part.shape, part.dtype) != (parts[0].shape, parts[0].dtype):
            raise ValueError(
                f"the parts hold {parts[0].dtype} {list(parts[0].shape)} and {part.dtype} {list(part.shape)}"
            )


def _slice(tensor: Virtual, dim: int, start: int, size: int) -> Virtual:
    if start + size > tensor.shape[dim]:
        raise ValueError(f"a part has {tensor.shape[dim]} elements along dim {dim}, not {start + size}")
    offsets, sizes = [0] * len(tensor.shape), list(tensor.shape)
    offsets[dim], sizes[dim] = start, size
    return cut(tensor, Box(tuple(offsets), tuple(sizes)))
