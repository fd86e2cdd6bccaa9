"""Bound what a manifest's Parquet file may decode to by its own size, before it is decoded.

A few bytes can say "the same row, thirty million times". A manifest's rows differ, so they can't be had for
less than about a byte each. The claims are read from the bytes themselves, footer and page headers, as the
decoder will find them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from elastic_train.checkpoint.validate.manifest_rows import malformed
from elastic_train.checkpoint.validate.thrift import Reader
from elastic_train.errors import Malformed

FREE_ROWS = 200_000
"""Rows that any manifest may have, however small its file is."""
FREE_VALUES = 2_000_000
"""Numbers in a column of boxes, likewise."""
GROUP = 1 << 17
"""Rows of a group of rows, which is decoded at once."""
PAGES_OF_A_ROW = 64
FREE_BYTES = 64 << 20
EXPANSION = 64
"""Bytes of all columns after decompression over those of the file."""
TEXT_OF_A_ROW = 512
TEXTS = ("tensor", "state", "dtype", "file", "logical")
CODED = pa.dictionary(pa.int32(), pa.string())
FOOTER = 8
"""Bytes at the end: the length of the footer, and who it is."""
_DATA_PAGE, _DICTIONARY_PAGE, _DATA_PAGE_V2 = 5, 7, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """One column in one group of rows: where its pages are, and what they are said to hold."""

    name: str
    start: int
    end: int
    values: int


class Parquet:
    """A manifest's file that may be decoded: all columns are there, and their sizes are in proportion."""

    def __init__(self, data: bytes, schema: pa.Schema, *, url: str) -> None:
        self._data, self._schema, self._url = data, schema, url
        self.group_rows: list[int] = []
        self._chunks: list[list[Chunk]] = []
        try:
            self._look(data)
            self._file = pq.ParquetFile(
                pa.BufferReader(data),
                read_dictionary=list(TEXTS),
                thrift_string_size_limit=max(len(data), 1),
                thrift_container_size_limit=max(len(data), 1),
            )
            found = (self._file.metadata.metadata or {}).items()
            self.words = {k.decode(): v.decode() for k, v in found}
        except (pa.ArrowException, OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise self._refuse(f"its manifest can't be read ({error!s:.300})") from error
        self._check_columns()

    def read(
        self,
        groups: Sequence[int] | None = None,
        *,
        columns: Sequence[str] | None = None,
        coded: bool = False,
    ) -> pa.Table:
        """Groups of rows, or all of them, as columns of the schema, or some of these.

        `coded`: text stays numbers of its distinct values.
        """
        names = list(columns or self._schema.names)
        numbers = range(len(self.group_rows)) if groups is None else groups
        try:
            for number in numbers:
                for chunk in self._chunks[number]:
                    if chunk.name.partition(".")[0] in names:
                        self._check_pages(chunk)
            found = self._file.read_row_groups(list(numbers), columns=names)
            found.validate(full=True)  # text that is UTF-8, numbers of names that there are
            texts = (c for name in TEXTS if name in names for c in found.column(name).chunks)
            text = sum(_text_bytes(c) for c in texts if pa.types.is_dictionary(c.type))
            if text > FREE_BYTES + TEXT_OF_A_ROW * found.num_rows:
                raise self._refuse(
                    f"the names in {found.num_rows} rows of its manifest are {text} bytes long"
                )
            schema = pa.schema([self._schema.field(name) for name in names])
            for field in schema:
                if not field.nullable and found.column(field.name).null_count:
                    raise self._refuse(f"a row of its manifest has no {field.name}")
            if not coded:
                return found.select(names).cast(schema)
            fields = [f if f.name not in TEXTS else f.with_type(CODED) for f in schema]
            return found.select(names).cast(pa.schema(fields))
        except (pa.ArrowException, OSError, ValueError, LookupError, TypeError) as error:
            raise self._refuse(f"its manifest can't be read ({error!s:.300})") from error

    def _look(self, data: bytes) -> None:
        """Take the claims from the footer; ValueError, or Malformed where they are out of proportion."""
        length = int.from_bytes(data[-FOOTER:-4], "little")
        if data[-4:] != b"PAR1" or not 0 < length <= len(data) - FOOTER:
            raise ValueError("it is no Parquet file")
        footer: dict[int, Any] = Reader(data[len(data) - FOOTER - length : len(data) - FOOTER]).struct()
        rows, size = footer[3], len(data)
        if not 0 <= rows <= FREE_ROWS + size:
            raise self._refuse(f"its manifest of {size} bytes claims {rows} rows")
        values: dict[str, int] = {}
        unpacked = 0
        for group in footer[4]:
            if not 0 <= group[3] <= max(GROUP, FREE_ROWS):
                raise self._refuse(f"a group of rows of its manifest claims {group[3]} rows")
            self.group_rows.append(group[3])
            self._chunks.append([_chunk(column) for column in group[1]])
            for column, chunk in zip(group[1], self._chunks[-1], strict=True):
                values[chunk.name] = values.get(chunk.name, 0) + chunk.values
                unpacked += column[3][6]
                if chunk.values < 0 or column[3][6] < 0 or not 0 <= chunk.start <= chunk.end <= size:
                    raise self._refuse(f"the column {chunk.name} of its manifest lies outside of it")
        for name, count in values.items():
            pages = PAGES_OF_A_ROW * rows if name.startswith("checksums") else 0
            if count > max(FREE_VALUES, pages) + size:
                raise self._refuse(f"the column {name} of its manifest of {size} bytes claims {count} values")
        if unpacked > FREE_BYTES + EXPANSION * size or sum(self.group_rows) != rows:
            raise self._refuse(f"its manifest of {size} bytes claims {rows} rows of {unpacked} bytes")

    def _check_columns(self) -> None:
        there = self._file.schema_arrow
        for field in self._schema:
            if there.get_field_index(field.name) < 0:
                raise self._refuse(f"its manifest has no column {field.name}, or more than one")
        for name in TEXTS:
            kind = there.field(name).type
            if pa.types.is_null(kind) and self._schema.field(name).nullable:
                continue
            if not pa.types.is_dictionary(kind) or not pa.types.is_string(kind.value_type):
                raise self._refuse(f"the column {name} of its manifest is {kind} and not text")

    def _check_pages(self, chunk: Chunk) -> None:
        """The pages of a chunk hold no more than the footer says."""
        at, values, unpacked = chunk.start, 0, 0
        while at < chunk.end:
            reader = Reader(memoryview(self._data)[: chunk.end], at)
            header = reader.struct()
            if header[3] < 0 or header[2] < 0:
                raise ValueError(f"a page of {chunk.name} of less than no bytes")
            at = reader.at + header[3]
            unpacked += header[2]
            own = header.get(_DATA_PAGE) or header.get(_DATA_PAGE_V2)
            values += own[1] if own else 0
            most = own or header.get(_DICTIONARY_PAGE) or {1: 0}
            if not 0 <= most[1] <= FREE_VALUES + len(self._data):
                raise ValueError(f"a page of {chunk.name} claims {most[1]} values")
        if at != chunk.end or values != chunk.values or unpacked > FREE_BYTES + EXPANSION * len(self._data):
            raise ValueError(f"the pages of {chunk.name} aren't what the footer says")

    def _refuse(self, what: str) -> Malformed:
        return malformed(self._url, what)


def _chunk(column: dict[int, Any]) -> Chunk:
    said = column[3]
    begins = [at for at in (said[9], said.get(11, 0)) if at] or [0]  # without rows there is no first page
    name = b".".join(said[3]).decode()
    return Chunk(name=name, start=min(begins), end=min(begins) + said[7], values=said[5])


def _text_bytes(column: pa.DictionaryArray) -> int:
    """Bytes of a column of text once each row has its own."""
    lengths = pc.call_function("binary_length", [column.dictionary])
    each = lengths.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    rows = column.indices.drop_null().to_numpy(zero_copy_only=False)
    return int(each[rows].sum()) if len(each) else 0
