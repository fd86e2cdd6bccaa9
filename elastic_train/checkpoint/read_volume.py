"""Count bytes and reads of a restore without planning each read, for plans of a million fragments."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from elastic_train.checkpoint.checksums import SMALLEST
from elastic_train.checkpoint.manifest import numbered
from elastic_train.checkpoint.manifest_pages import Ints
from elastic_train.checkpoint.ranges import GAP, MOST, RangeIndex, Request, row_ranges
from elastic_train.geometry.box import Box


class ReadVolume:
    """The same numbers as those of `RangeIndex.reads`, where most rows are needed whole, or are one page."""

    def __init__(self, index: RangeIndex) -> None:
        self._index, manifest = index, index.manifest
        table, fragments = manifest.columns()
        self._at: Ints = table.column("byte_offset").to_numpy()
        self._size, self._sizes = fragments.nbytes, fragments.sizes
        sums = pa.concat_arrays([pa.array([], pa.list_(pa.uint32())), *table.column("checksums").chunks])
        self._summed = sums.is_valid().to_numpy(zero_copy_only=False)
        file, names = numbered(table.column("file"))
        order = np.argsort(np.array(names, dtype=object)) if names else np.zeros(0, np.int64)
        rank = np.empty(len(names), dtype=np.int64)
        rank[order] = np.arange(len(names))
        self._file: Ints = rank[file]

    def of(self, requests: Sequence[Request]) -> tuple[int, int]:
        """Bytes, and the number of reads."""
        found = [(i, *self._index.hits(*request)) for i, request in enumerate(requests)]
        rows = np.concatenate([np.zeros(0, np.int64), *(rows for _, rows, _, _ in found)])
        full = np.concatenate(
            [np.zeros(0, np.bool_), *(self._full(rows, sizes) for _, rows, _, sizes in found)]
        )
        whole = np.zeros(len(self._at), dtype=np.bool_)
        whole[rows[full]] = True
        wanted = np.unique(rows)
        simple = self._summed[wanted] & (whole[wanted] | (self._size[wanted] <= SMALLEST))
        parts: dict[int, list[tuple[int, Box]]] = {int(row): [] for row in wanted[~simple]}
        for i, own, offsets, sizes in found if parts else ():
            for place in np.flatnonzero(np.isin(own, wanted[~simple])).tolist():
                box = Box(tuple(offsets[place].tolist()), tuple(sizes[place].tolist()))
                parts[int(own[place])].append((i, box))
        pieces = [_in_pieces(self._file[r], self._at[r], self._size[r]) for r in (wanted[simple],)]
        rest = zip(self._index.manifest.rows(list(parts)), parts.items(), strict=True)
        ranges = [(self._file[row], s) for held, (row, own) in rest for s in row_ranges(held, own)]
        pieces.append(np.array([[f, s.start, s.length] for f, s in ranges], dtype=np.int64).reshape(-1, 3))
        return _volume(np.concatenate(pieces))

    def _full(self, rows: Ints, sizes: Ints) -> np.ndarray:
        """Which rows are needed whole."""
        own = self._sizes[rows][:, : sizes.shape[1]]
        return (own == sizes).all(axis=1)


def _in_pieces(file: Ints, at: Ints, size: Ints) -> Ints:
    """Ranges of at most MOST bytes, [n, 3]: file, start and length."""
    counts = -(-size // MOST)
    source = np.repeat(np.arange(len(size)), counts)
    number = np.arange(len(source)) - np.repeat(np.cumsum(counts) - counts, counts)
    start = at[source] + number * MOST
    length = np.minimum(size[source] - number * MOST, MOST)
    return np.stack([file[source], start, length], axis=1)


def _volume(ranges: Ints) -> tuple[int, int]:
    """Bytes and number of the reads that neighbours in a file are joined to."""
    ranges = ranges[np.lexsort((ranges[:, 1], ranges[:, 0]))]
    total = count = 0
    of, begin, end = -1, 0, 0
    for file, start, length in zip(*ranges.T.tolist(), strict=True):
        after = max(end, start + length)
        if file != of or start > end + GAP or after - begin > MOST:
            total += end - begin
            count += 1
            of, begin, end = file, start, start + length
        else:
            end = after
    return total + end - begin, count
