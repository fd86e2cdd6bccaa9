"""Tensors that hold several projections in one, cut over ranks part by part.

A rank's rows are then not one range: with parts q, k, v and two ranks, rank 0 holds the first halves of q,
of k and of v. Laid out rank by rank the rows are a permutation of the logical ones, in which every cut is a
range.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from elastic_train.geometry.box import Box


@dataclass(frozen=True, slots=True)
class Run:
    """Rows that lie together in both orders: `length` rows from `start` on, logically from `logical` on."""

    start: int
    logical: int
    length: int


def fused_runs(parts: Sequence[int], ranks: int) -> tuple[Run, ...]:
    """The order of rows that a cut over `ranks` needs; every part, in rows, must divide."""
    assert all(part % ranks == 0 for part in parts), (parts, ranks)
    runs: list[Run] = []
    start = 0
    for rank in range(ranks):
        first = 0
        for part in parts:
            length = part // ranks
            runs.append(Run(start, first + rank * length, length))
            start += length
            first += part
    return tuple(runs)


def logical_boxes(box: Box, runs: Sequence[Run]) -> Iterator[tuple[Box, int]]:
    """The logical boxes of one whose rows are in rank order, and at which row of it each begins."""
    low, high = box.offsets[0], box.offsets[0] + box.sizes[0]
    for run in runs:
        first, stop = max(low, run.start), min(high, run.start + run.length)
        if first < stop:
            offset = run.logical + first - run.start
            yield (
                Box((offset, *box.offsets[1:]), (stop - first, *box.sizes[1:])),
                first - low,
            )
