"""Verify the bytes of a manifest's rows: files are read in order, in large ranges."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import crc32c
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from elastic_train.checkpoint import crc_joining
from elastic_train.checkpoint.checksums import content_hash, digest, running_hash
from elastic_train.checkpoint.document import encode
from elastic_train.checkpoint.manifest import Manifest, numbered
from elastic_train.checkpoint.validate.manifest_rows import spans

RANGE = 4 << 20
"""Bytes of one read, and the largest fragment that is verified with others: few enough to be in a cache still
when they are summed."""
GAP = 64 << 10
ROWS = 1 << 14
"""Rows of a batch."""
Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowBatch:
    """Rows of one file whose bytes lie in `start` .. `start + length` of it."""

    rows: Ints
    start: int
    length: int


class RowColumns:
    """The columns of a manifest that say what its bytes must be."""

    def __init__(self, manifest: Manifest) -> None:
        table, self.fragments = manifest.columns()
        self.at: Ints = table.column("byte_offset").to_numpy()
        self.size: Ints = self.fragments.nbytes
        self._end: Ints = self.at + spans(table, self.fragments)
        sums = pa.concat_arrays([pa.array([], pa.list_(pa.uint32())), *table.column("checksums").chunks])
        self.summed: npt.NDArray[np.bool_] = sums.is_valid().to_numpy(zero_copy_only=False)
        counts: Ints = sums.value_lengths().fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
        first: Ints = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)[:-1]
        self._sums = sums.flatten().to_numpy(zero_copy_only=False)
        self._whole = crc_joining.of_fragments(self._sums, first, counts, self.size)
        self._hashed, self._hashes = hashes(table)
        self._file, self._files = numbered(table.column("file"))

    def batches(self) -> Iterator[RowBatch]:
        """All rows with checksums, in the order of their files."""
        rows = np.flatnonzero(self.summed & (self.size > 0))
        rows = rows[np.lexsort((self.at[rows], self._file[rows]))]
        if not len(rows):
            return
        at, end, file = self.at[rows], self.at[rows] + self.size[rows], self._file[rows]
        alone = self.size[rows] > RANGE
        apart = alone[1:] | alone[:-1] | (file[1:] != file[:-1]) | (at[1:] > end[:-1] + GAP)
        apart |= (at[1:] // RANGE != at[:-1] // RANGE) | (np.arange(1, len(rows)) % ROWS == 0)
        begins = np.concatenate([[0], np.flatnonzero(apart) + 1])
        reach = np.maximum.reduceat(end, begins).tolist()
        for own, stop in zip(np.split(rows, begins[1:]), reach, strict=True):
            start = int(self.at[own[0]])
            yield RowBatch(rows=own, start=start, length=stop - start)

    def last(self) -> Iterator[Ints]:
        """For each file the rows without checksums, the one that ends last first."""
        rows = np.flatnonzero(~self.summed & (self.size > 0))
        rows = rows[np.lexsort((-self._end[rows], self._file[rows]))]
        heads = np.flatnonzero(np.diff(self._file[rows], prepend=-1))
        yield from np.split(rows, heads[1:]) if len(rows) else ()

    def digest(self) -> str:
        """Of the bytes that these rows say there are, and of how they are put into batches."""
        columns = (self.at, self.size, self._file, self._sums, self._hashes)
        sums = [content_hash(np.ascontiguousarray(column).data).hex() for column in columns]
        return digest(encode([RANGE, GAP, ROWS, self._files, sums]))

    def file(self, batch: RowBatch) -> str:
        return self._files[self._file[batch.rows[0]]]

    def foreign_files(self) -> list[str]:
        """The files of rows that have no checksums of ours."""
        return sorted(self._files[n] for n in np.unique(self._file[~self.summed]))

    def wrong(self, batch: RowBatch, data: bytes) -> list[int]:
        """The rows of a batch whose bytes aren't the ones written."""
        view = memoryview(data)
        low = self.at[batch.rows] - batch.start
        parts = [view[a:b] for a, b in zip(low.tolist(), (low + self.size[batch.rows]).tolist(), strict=True)]
        found = np.array([crc32c.crc32c(part) for part in parts], dtype=np.uint32)
        digests = b"".join([xxhash.xxh3_128_digest(part) for part in parts])
        return batch.rows[self._differ(batch.rows, found, digests)].tolist()

    def one_is_wrong(self, batch: RowBatch, pieces: Iterable[bytes]) -> bool:
        """Whether the bytes of a batch of one row, which come in pieces, aren't the ones written."""
        found, content = 0, running_hash()
        for piece in pieces:
            found = crc32c.crc32c(piece, found)
            content.update(piece)
        return bool(self._differ(batch.rows, np.array([found], dtype=np.uint32), content.digest())[0])

    def _differ(self, rows: Ints, sums: Words, digests: bytes) -> npt.NDArray[np.bool_]:
        """Which rows should have other sums, [n], or other hashes, 16 bytes each."""
        other = (np.frombuffer(digests, dtype=np.uint8).reshape(-1, 16) != self._hashes[rows]).any(axis=1)
        return (sums != self._whole[rows]) | (other & self._hashed[rows])


def hashes(table: pa.Table) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.uint8]]:
    """Which rows have a content hash, and the hashes, [n, 16]."""
    column = pa.concat_arrays([pa.array([], pa.binary(16)), *table.column("hash").chunks])
    there: npt.NDArray[np.bool_] = column.is_valid().to_numpy(zero_copy_only=False)
    held = column.fill_null(bytes(16)).buffers()[1]
    data = np.frombuffer(held, dtype=np.uint8) if held is not None else np.zeros(0, np.uint8)
    return there, data[16 * column.offset : 16 * (column.offset + len(column))].reshape(-1, 16)


Progress = Callable[[int, int], None]
"""Told after each range: bytes that were looked at, and all there are."""


def reported(problems: Sequence[str], more: int) -> tuple[str, ...]:
    """The problems, and how many fragments weren't put in words."""
    return (*problems, f"and {more} more fragments are damaged or gone") if more > 0 else tuple(problems)
