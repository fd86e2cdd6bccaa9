"""Plan reads of boxes: the pages that they touch, joined into few ranges of few files.

Pure: manifest and boxes in, reads out. A fragment with checksums is read in whole pages, so that every byte
used is verified; one without is read by exact byte span.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from elastic_train.checkpoint.checksums import page_bytes
from elastic_train.checkpoint.dtypes import ELEMENTS
from elastic_train.checkpoint.manifest import Manifest, Row
from elastic_train.errors import FragmentMissing, TensorMismatch
from elastic_train.geometry.box import Box

GAP = 4096
"""Unneeded bytes between two ranges that are read along rather than asked for twice."""
MOST = 8 << 20
"""Bytes of one read: enough to be fast, few enough that the allocator hands out the same
memory again. Touching new memory costs more than reading into it.
"""

LARGE = 64 << 20
FEW = 32
"""Rows of a tensor up to which Python is faster than numpy."""
Ints = npt.NDArray[np.int64]

Request = tuple[str, str, Box]
"""Tensor, state and a box of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FragmentRange:
    """Consecutive bytes of one fragment: from its byte `at` on, `length` of them, at `start` in its file.

    `wanted` names the requests that need some of it and the box that each needs, in the fragment's
    coordinates.
    """

    row: Row
    start: int
    at: int
    length: int
    wanted: tuple[tuple[int, Box], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """One range of one file and the segments in it."""

    file: str
    start: int
    length: int
    segments: tuple[FragmentRange, ...]


class RangeIndex:
    """Where the rows of each tensor are in a manifest."""

    def __init__(self, manifest: Manifest, *, url: str) -> None:
        self.manifest, self._url = manifest, url
        self._key = {name: i for i, name in enumerate(manifest.kinds[0])}
        self._few: dict[int, list[tuple[int, Box]]] = {}  # the rows of keys that have few

    def reads(
        self, requests: Sequence[Request], *, large: Callable[[Sequence[Row]], None] = lambda rows: None
    ) -> list[Read]:
        """The reads that together bring every element of every request, by file and place.

        `large` is shown the rows of more than LARGE bytes before they are cut into reads.
        """
        wanted: dict[int, list[tuple[int, Box]]] = {}
        for index, (tensor, state, box) in enumerate(requests):
            for row, part in self.parts(tensor, state, box):
                wanted.setdefault(row, []).append((index, part))
        rows = self.manifest.rows(list(wanted))
        large([row for row in rows if row.box.numel * ELEMENTS[row.dtype].bytes > LARGE])
        segments = [
            s for row, parts in zip(rows, wanted.values(), strict=True) for s in row_ranges(row, parts)
        ]
        return _joined(sorted(segments, key=lambda s: (s.row.file, s.start)))

    def parts(self, tensor: str, state: str, box: Box) -> list[tuple[int, Box]]:
        """The fragments that share elements with a box, and which, in the fragment's coordinates."""
        key = self._checked(tensor, state, box)
        if not box.numel:
            return []
        few = self._few.get(key)
        if few is None:
            rows, low, size = self.manifest.boxes(key)
            if len(rows) > FEW:
                inner = zip(*(column.tolist() for column in self.hits(tensor, state, box)), strict=True)
                return [(row, Box(tuple(offsets), tuple(sizes))) for row, offsets, sizes in inner]
            boxes = map(Box, map(tuple, low.tolist()), map(tuple, size.tolist()))
            few = self._few[key] = list(zip(rows.tolist(), boxes, strict=True))
        shared = [(row, held, box.intersect(held)) for row, held in few]
        found = [(row, part.within(held)) for row, held, part in shared if part is not None]
        self._check(tensor, state, box, sum(part.numel for _, part in found))
        return found

    def hits(self, tensor: str, state: str, box: Box) -> tuple[Ints, Ints, Ints]:
        """The same as columns: rows, offsets and sizes."""
        key = self._checked(tensor, state, box)
        rows, low, size = self.manifest.boxes(key)
        if not box.numel:
            return rows[:0], low[:0], size[:0]
        first = np.array(box.offsets, dtype=np.int64)
        start = np.maximum(low, first)
        stop = np.minimum(low + size, first + np.array(box.sizes, dtype=np.int64))
        hit = (stop > start).all(axis=1)
        self._check(tensor, state, box, int(np.prod(stop[hit] - start[hit], axis=1).sum()))
        return rows[hit], (start - low)[hit], (stop - start)[hit]

    def _checked(self, tensor: str, state: str, box: Box) -> int:
        """The key of a tensor that has this box."""
        key = self._key.get((tensor, state))
        if key is None:
            raise TensorMismatch(url=self._url, problem=f"it has no {tensor} ({state}).")
        shape = self.manifest.kinds[2][key]
        if len(box.sizes) != len(shape) or (box.numel and not _inside(box, shape)):
            raise TensorMismatch(url=self._url, problem=f"{tensor} ({state}) of {shape} has no box {box}.")
        return key

    def _check(self, tensor: str, state: str, box: Box, found: int) -> None:
        if found != box.numel:
            problem = f"of {tensor} ({state}) {box} has {box.numel} elements and {found} are stored."
            raise FragmentMissing(url=self._url, problem=problem)


def _inside(box: Box, shape: tuple[int, ...]) -> bool:
    ends = (offset + size for offset, size in zip(box.offsets, box.sizes, strict=True))
    return min(box.offsets, default=0) >= 0 and all(e <= n for e, n in zip(ends, shape, strict=True))


def touched(sizes: tuple[int, ...], box: Box, item: int) -> npt.NDArray[np.bool_]:
    """Which pages of a row-major fragment of these sizes hold an element of the box, [pages]."""
    strides = [math.prod(sizes[d + 1 :]) * item for d in range(len(sizes))]
    run, outer = item, len(sizes)
    while outer and box.sizes[outer - 1] == sizes[outer - 1]:  # whole trailing dims are one run of bytes
        outer -= 1
        run *= sizes[outer]
    if outer:
        outer -= 1
        run *= box.sizes[outer]
    first = np.array([sum(o * s for o, s in zip(box.offsets, strides, strict=True))], dtype=np.int64)
    for d in range(outer):
        first = (first[:, None] + np.arange(box.sizes[d], dtype=np.int64) * strides[d]).reshape(-1)
    page = page_bytes(math.prod(sizes) * item)
    edges = np.zeros(-(-math.prod(sizes) * item // page) + 1, dtype=np.int64)
    np.add.at(edges, first // page, 1)
    np.add.at(edges, (first + run - 1) // page + 1, -1)
    return np.cumsum(edges)[:-1] > 0


def strides_of(row: Row, item: int) -> tuple[int, ...]:
    """Bytes from an element to the next one along each dim."""
    if row.byte_strides is not None:
        return row.byte_strides
    return tuple(math.prod(row.box.sizes[d + 1 :]) * item for d in range(len(row.box.sizes)))


def extent(row: Row) -> int:
    """Bytes from the first of a row to behind its last."""
    item = ELEMENTS[row.dtype].bytes
    if not row.box.numel:
        return 0
    return item + sum((n - 1) * s for n, s in zip(row.box.sizes, strides_of(row, item), strict=True))


def row_ranges(row: Row, parts: list[tuple[int, Box]]) -> list[FragmentRange]:
    item = ELEMENTS[row.dtype].bytes
    if row.checksums is None:
        return [segment for index, part in parts for segment in _spans(row, index, part, item)]
    pages = len(row.checksums)
    if pages == 1 or any(part.sizes == row.box.sizes for _, part in parts):
        runs = [[0, pages]]
    else:
        needed = np.zeros(pages, dtype=np.int8)
        for _, part in parts:
            needed |= touched(row.box.sizes, part, item)
        runs = np.flatnonzero(np.diff(needed, prepend=0, append=0)).reshape(-1, 2).tolist()
    size = row.box.numel * item
    page = page_bytes(size)
    found: list[FragmentRange] = []
    for first, stop in runs:
        for at in range(first * page, min(stop * page, size), MOST):
            length = min(at + MOST, stop * page, size) - at
            found.append(
                FragmentRange(row=row, start=row.byte_offset + at, at=at, length=length, wanted=tuple(parts))
            )
    return found


def _spans(row: Row, index: int, part: Box, item: int) -> list[FragmentRange]:
    """A box of a fragment without pages, cut along its widest stride until no read is larger than MOST."""
    whole = _span(row, index, part, item)
    if whole.length <= MOST:
        return [whole]
    strides = strides_of(row, item)
    dim = max((d for d, size in enumerate(part.sizes) if size > 1), key=lambda d: strides[d])
    half = part.sizes[dim] // 2
    cuts = ((part.offsets[dim], half), (part.offsets[dim] + half, part.sizes[dim] - half))
    found: list[FragmentRange] = []
    for offset, size in cuts:
        offsets = (*part.offsets[:dim], offset, *part.offsets[dim + 1 :])
        sizes = (*part.sizes[:dim], size, *part.sizes[dim + 1 :])
        found += _spans(row, index, Box(offsets, sizes), item)
    return found


def _span(row: Row, index: int, part: Box, item: int) -> FragmentRange:
    """From the first to the last byte of a box in a fragment that is laid out by strides."""
    strides = strides_of(row, item)
    at = sum(o * s for o, s in zip(part.offsets, strides, strict=True))
    length = item + sum((n - 1) * s for n, s in zip(part.sizes, strides, strict=True))
    return FragmentRange(row=row, start=row.byte_offset + at, at=at, length=length, wanted=((index, part),))


def _joined(segments: list[FragmentRange]) -> list[Read]:
    """Neighbours in a file made one read, up to MOST bytes."""
    reads: list[Read] = []
    group: list[FragmentRange] = []
    end = 0

    def close() -> None:
        if group:
            start = group[0].start
            reads.append(Read(file=group[0].row.file, start=start, length=end - start, segments=tuple(group)))
            group.clear()

    for segment in segments:
        after = max(end, segment.start + segment.length)
        apart = group and (
            segment.row.file != group[0].row.file
            or segment.start > end + GAP
            or after - group[0].start > MOST
        )
        if apart:
            close()
        end = after if group else segment.start + segment.length
        group.append(segment)
    close()
    return reads
