"""The manifest: the table of a checkpoint's fragments, one row each, in Parquet.

A row says where the bytes of one box of a logical tensor are. It says nothing about ranks. `file` is
relative to the checkpoint's directory, where `../` may lead to an older checkpoint of the run, or an
absolute path or URL for bytes that another system wrote. Rows without checksums, which only such files have,
can't be verified.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from elastic_train.checkpoint.checksums import LARGEST
from elastic_train.checkpoint.document import VERSION, check_version
from elastic_train.checkpoint.dtypes import element
from elastic_train.checkpoint.manifest_pages import ROWS, Ints, Pages, encode_index
from elastic_train.checkpoint.validate.manifest_parquet import Parquet
from elastic_train.checkpoint.validate.manifest_rows import (
    FROM_WHOM,
    check_columns,
    check_rows,
    malformed,
    two_voices,
)
from elastic_train.errors import FormatUnsupported, FragmentMissing
from elastic_train.geometry.box import Box
from elastic_train.geometry.coverage import untiled
from elastic_train.geometry.fragments import Fragments

SCHEMA = pa.schema(
    [
        pa.field("tensor", pa.string(), nullable=False),
        pa.field("state", pa.string(), nullable=False),
        pa.field("dtype", pa.string(), nullable=False),
        pa.field("shape", pa.list_(pa.int64()), nullable=False),
        pa.field("offsets", pa.list_(pa.int64()), nullable=False),
        pa.field("sizes", pa.list_(pa.int64()), nullable=False),
        pa.field("logical", pa.string()),
        pa.field("file", pa.string(), nullable=False),
        pa.field("byte_offset", pa.int64(), nullable=False),
        pa.field("byte_strides", pa.list_(pa.int64())),
        pa.field("checksums", pa.list_(pa.uint32())),
        pa.field("hash", pa.binary(16)),
    ]
)
_KEY = "elastic_train."
Kinds = tuple[tuple[tuple[str, str], ...], tuple[str, ...], tuple[tuple[int, ...], ...]]
"""Names, dtypes and shapes, by key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One fragment. `byte_strides` is None where the box's elements follow one another in row-major order."""

    tensor: str
    state: str
    dtype: str
    shape: tuple[int, ...]
    box: Box
    file: str
    byte_offset: int
    byte_strides: tuple[int, ...] | None = None
    checksums: tuple[int, ...] | None = None
    hash: bytes | None = None
    logical: str | None = None


class Manifest:
    """The table and its `extra` words; each tensor has one dtype and one shape in all of its rows.

    A large one that was read from a file stays there until its rows are asked for.
    """

    def __init__(
        self,
        *,
        extra: Mapping[str, str],
        table: pa.Table | None = None,
        fragments: Fragments | None = None,
        pages: Pages | None = None,
        url: str = "",
    ) -> None:
        self.extra = dict(extra)
        self._table, self._fragments = table, fragments
        self._pages, self._url = pages, url
        self._sound: dict[int, Fragments] = {}  # tensors of the pages that were checked, by key
        self._order: tuple[Ints, Ints] | None = None  # rows by key, and where those of each key begin

    @property
    def table(self) -> pa.Table:
        if self._table is None:
            table, self._fragments = self.columns()
            self._table = table.cast(SCHEMA)
        return self._table

    def columns(self) -> tuple[pa.Table, Fragments]:
        """All rows, for one look at them: those of a large manifest aren't kept.

        Text may be numbers of its distinct values: `numbered` reads it either way.
        """
        if self._table is not None:
            return self._table, self.fragments
        assert self._pages is not None
        table = self._pages.whole().combine_chunks()
        found = _fragments(table, self._url)
        if (found.names, found.dtypes, found.shapes) != self.kinds:
            raise malformed(self._url, "its manifest's index is not of its rows")
        return table, found

    @property
    def fragments(self) -> Fragments:
        """The boxes of all rows, as columns."""
        if self._fragments is None:
            table = self.table  # of pages, it brings its fragments along
            if self._fragments is None:
                self._fragments = _fragments(table, self._url)
        return self._fragments

    @property
    def kinds(self) -> Kinds:
        """Names, dtypes and shapes by key; `fragments` may have them in another order."""
        if self._pages is not None:
            return self._pages.names, self._pages.dtypes, self._pages.shapes
        return self.fragments.names, self.fragments.dtypes, self.fragments.shapes

    def check_tiling(self, *, url: str) -> None:
        """FragmentMissing unless the rows tile their tensors; of a large manifest in a file, each tensor is
        checked when its rows are asked for.
        """
        if self._pages is None and (problem := untiled(self.fragments)) is not None:
            raise FragmentMissing(url=url, problem=f"{problem}. {FROM_WHOM}")

    def boxes(self, key: int) -> tuple[Ints, Ints, Ints]:
        """The rows of the tensor with this key of `kinds`: places, offsets and sizes, each [n, ndim]."""
        dims = len(self.kinds[2][key])
        if self._pages is not None and self._table is None:
            rows, table = self._pages.tensor(key)
            found = self._sound.get(key)
            if found is None:
                found = _fragments(table, self._url)
                if (found.names, found.shapes) != ((self.kinds[0][key],), (self.kinds[2][key],)):
                    raise two_voices(self._url, self.kinds[0][key])
                if (problem := untiled(found)) is not None:
                    raise FragmentMissing(url=self._url, problem=f"{problem}. {FROM_WHOM}")
                self._sound[key] = found
            return rows, found.offsets[:, :dims], found.sizes[:, :dims]
        fragments = self.fragments
        if self._order is None:
            rows = np.argsort(fragments.key, kind="stable")
            self._order = rows, np.searchsorted(fragments.key[rows], np.arange(len(fragments.names) + 1))
        rows, bounds = self._order
        own = rows[bounds[key] : bounds[key + 1]]
        return own, fragments.offsets[own][:, :dims], fragments.sizes[own][:, :dims]

    @classmethod
    def of(cls, rows: Iterable[Row], *, url: str = "", extra: Mapping[str, str] | None = None) -> Manifest:
        """The table of rows given one by one."""
        rows = list(rows)
        columns = {
            name: [getattr(row.box if name in ("offsets", "sizes") else row, name) for row in rows]
            for name in SCHEMA.names
        }
        return cls.from_table(pa.table(columns, schema=SCHEMA), url=url, extra=extra)

    @classmethod
    def concat(cls, parts: Sequence[Manifest], *, url: str, extra: Mapping[str, str]) -> Manifest:
        """All rows of the parts, those of a tensor together."""
        table = pa.concat_tables([SCHEMA.empty_table(), *(p.table for p in parts)])
        order = [(name, "ascending") for name in ("tensor", "state", "file", "byte_offset")]
        return cls.from_table(table.sort_by(order), url=url, extra=extra)

    @classmethod
    def from_table(cls, table: pa.Table, *, url: str, extra: Mapping[str, str] | None = None) -> Manifest:
        """A table of the schema, checked to speak of each tensor with one voice."""
        table = table.combine_chunks()
        return cls(table=table, fragments=_fragments(table, url), extra=dict(extra or {}))

    def encode(self) -> bytes:
        words = {"version": str(VERSION), "requires": "", "page_bytes": str(LARGEST), **self.extra}
        index = encode_index(self.fragments) if len(self) > ROWS else None
        if index is not None:
            words["index"] = index
        sink = pa.BufferOutputStream()
        with pq.ParquetWriter(sink, SCHEMA, compression="zstd", store_schema=False) as writer:
            writer.write_table(self.table, row_group_size=ROWS)
            writer.add_key_value_metadata({_KEY + k: v for k, v in words.items()})
        return sink.getvalue().to_pybytes()

    @classmethod
    def decode(cls, data: bytes, *, url: str) -> Manifest:
        file = Parquet(data, SCHEMA, url=url)
        words = {k.removeprefix(_KEY): v for k, v in file.words.items() if k.startswith(_KEY)}
        version, requires = words.pop("version", ""), words.pop("requires", "")
        number = int(version) if version.isdecimal() and len(version) < 10 else version
        check_version(number, requires.split(), url=url)
        if (page := words.pop("page_bytes", "")) != str(LARGEST):
            problem = f"its largest pages are of {page:.20} bytes and not of {LARGEST}."
            raise FormatUnsupported(url=url, problem=problem)
        index = words.pop("index", None)
        if index is not None:
            return cls(extra=words, pages=Pages(file, SCHEMA, index, url=url), url=url)
        table = file.read()
        return cls.from_table(table, url=url, extra=words)

    def counts(self) -> dict[tuple[str, str], int]:
        """How many fragments each tensor and state has."""
        if self._pages is not None:
            numbers = np.diff(self._pages.firsts)
        else:
            numbers = np.bincount(self.fragments.key, minlength=len(self.fragments.names))
        return dict(zip(self.kinds[0], numbers.tolist(), strict=True))

    def __len__(self) -> int:
        return len(self._pages) if self._pages is not None else self.table.num_rows

    def rows(self, indices: Sequence[int]) -> list[Row]:
        """The rows at these places, as values: for the few that are about to be read."""
        if self._pages is not None and self._table is None:
            for key in self._pages.keys(indices):
                self.boxes(key)
            table = self._pages.take(indices)
        else:
            table = self.table.take(pa.array(indices, pa.int64()))
        found: list[dict[str, Any]] = table.to_pylist()
        return [_row(value) for value in found]

    def row(self, index: int) -> Row:
        return self.rows([index])[0]

    def strings(self, column: str) -> list[str]:
        """A string column."""
        return self.table.column(column).to_pylist()

    def distinct(self, column: str) -> list[str]:
        """The distinct values of a string column, sorted."""
        if self._pages is not None and self._table is None:
            values = self._pages.column(column)
        else:
            values = self.table.column(column)
        return sorted(values.unique().to_pylist())


def _row(value: dict[str, Any]) -> Row:
    box = Box(tuple(value.pop("offsets")), tuple(value.pop("sizes")))
    for name in ("shape", "byte_strides", "checksums"):
        value[name] = None if value[name] is None else tuple(value[name])
    return Row(box=box, **value)


def _fragments(table: pa.Table, url: str) -> Fragments:
    """The boxes as columns, without an object per row."""
    check_columns(table, url=url)
    (tensor, tensors), (state, states) = (numbered(table.column(name)) for name in ("tensor", "state"))
    pairs = pa.array(tensor.astype(np.int64) * len(states) + state).dictionary_encode()
    key = pairs.indices.to_numpy()
    names = tuple((tensors[n // len(states)], states[n % len(states)]) for n in pairs.dictionary.to_pylist())
    # Names are numbered as they appear, so a row is the first of its name where the number is a new high.
    first = np.flatnonzero(np.diff(np.maximum.accumulate(key), prepend=-1))
    shape, ndim = _padded(table.column("shape"), 0)
    offsets, offsets_ndim = _padded(table.column("offsets"), 0)
    sizes, sizes_ndim = _padded(table.column("sizes"), 1)
    kinds, types = numbered(table.column("dtype"))
    same = (
        (ndim == ndim[first][key]) & (shape == shape[first][key]).all(axis=1) & (kinds == kinds[first][key])
    )
    same &= (offsets_ndim == ndim) & (sizes_ndim == ndim)
    if not same.all():
        raise two_voices(url, names[int(key[int(np.argmin(same))])])
    dtypes = tuple(types[kinds[i]] for i in first.tolist())
    for name in set(dtypes):
        element(name, url=url)
    found = Fragments(
        names=names,
        dtypes=dtypes,
        shapes=tuple(tuple(shape[i, : ndim[i]].tolist()) for i in first.tolist()),
        key=key,
        offsets=offsets,
        sizes=sizes,
    )
    check_rows(table, found, url=url)
    return found


def numbered(column: pa.ChunkedArray) -> tuple[npt.NDArray[np.int32], list[str]]:
    """A column of text without nulls as numbers, and the values that they number."""
    coded = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
    whole = pa.concat_arrays([pa.array([], coded.type), *coded.unify_dictionaries().chunks])
    return whole.indices.to_numpy(), whole.dictionary.to_pylist()


def _padded(column: pa.ChunkedArray, fill: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """A column of lists as [n, D], short ones filled up, and the lengths."""
    values = pa.concat_arrays([pa.array([], pa.list_(pa.int64())), *column.chunks])
    lengths = values.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64)
    dims = int(lengths.max()) if len(lengths) else 0
    if len(lengths) and int(lengths.min()) == dims:
        return values.flatten().to_numpy(zero_copy_only=False).reshape(len(lengths), dims), lengths
    padded = np.full((len(lengths), dims), fill, dtype=np.int64)
    padded[np.arange(dims) < lengths[:, None]] = values.flatten().to_numpy(zero_copy_only=False)
    return padded, lengths
