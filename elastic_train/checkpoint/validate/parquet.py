"""A Parquet file as a manifest: what it claims to hold is bounded by its own size before it is decoded.

A few bytes can say "the same row, thirty million times". A manifest's rows differ, so they can't be had for
less than about a byte each.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from elastic_train.checkpoint.validate.rows import MOST_DIMS, malformed

FREE_ROWS = 200_000
"""Rows that any manifest may have, however small its file is."""
GROUP = 1 << 17
"""Rows of a group of rows, which is decoded at once."""
PAGES_OF_A_ROW = 64
FREE_BYTES = 64 << 20
EXPANSION = 64
"""Bytes of a column after decompression over those of the file."""
TEXT_OF_A_ROW = 512
TEXTS = ("tensor", "state", "dtype", "file", "logical")


def open_parquet(data: bytes, schema: pa.Schema, *, url: str) -> pq.ParquetFile:
    """The file, if it may be decoded: all columns are there, and their sizes are in proportion."""
    file = pq.ParquetFile(
        pa.BufferReader(data),
        read_dictionary=list(TEXTS),
        thrift_string_size_limit=max(len(data), 1),
        thrift_container_size_limit=max(len(data), 1),
    )
    there = file.schema_arrow
    for field in schema:
        if there.get_field_index(field.name) < 0:
            raise malformed(url, f"its manifest has no column {field.name}")
    for name in TEXTS:
        kind = there.field(name).type
        if pa.types.is_null(kind) and schema.field(name).nullable:
            continue
        if not pa.types.is_dictionary(kind) or not pa.types.is_string(kind.value_type):
            raise malformed(url, f"the column {name} of its manifest is {kind} and not text")
    metadata = file.metadata
    if metadata.num_columns > 4 * len(schema):
        raise malformed(url, f"its manifest has {metadata.num_columns} columns")
    if metadata.num_rows > FREE_ROWS + len(data):
        raise malformed(url, f"its manifest of {len(data)} bytes claims {metadata.num_rows} rows")
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        if not 0 <= group.num_rows <= max(GROUP, FREE_ROWS):
            raise malformed(url, f"a group of rows of its manifest claims {group.num_rows} rows")
        for place in range(group.num_columns):
            column = group.column(place)
            most = group.num_rows * max(PAGES_OF_A_ROW, MOST_DIMS) + len(data)
            if column.num_values > most or column.total_uncompressed_size > FREE_BYTES + EXPANSION * len(
                data
            ):
                raise malformed(
                    url,
                    f"the column {column.path_in_schema} of its manifest of {len(data)} bytes claims "
                    f"{column.num_values} values in {column.total_uncompressed_size} bytes",
                )
    return file


def decoded(file: pq.ParquetFile, groups: Sequence[int] | None, schema: pa.Schema, *, url: str) -> pa.Table:
    """Groups of rows, or all of them, as columns of the schema."""
    names = schema.names
    try:
        found = file.read(columns=names) if groups is None else file.read_row_groups(groups, columns=names)
        found.validate(full=True)  # text that is UTF-8, numbers of names that there are
        named = (c for name in TEXTS for c in found.column(name).chunks if pa.types.is_dictionary(c.type))
        text = sum(map(_text_bytes, named))
        if text > FREE_BYTES + TEXT_OF_A_ROW * found.num_rows:
            raise malformed(url, f"the names in {found.num_rows} rows of its manifest are {text} bytes long")
        for field in schema:
            if not field.nullable and found.column(field.name).null_count:
                raise malformed(url, f"a row of its manifest has no {field.name}")
        return found.select(names).cast(schema)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise malformed(url, f"its manifest can't be read ({error!s:.300})") from error


def _text_bytes(column: pa.DictionaryArray) -> int:
    """Bytes of a column of text once each row has its own."""
    lengths = pc.call_function("binary_length", [column.dictionary])
    each = np.nan_to_num(lengths.to_numpy(zero_copy_only=False).astype(np.float64))
    rows = column.indices.drop_null().to_numpy(zero_copy_only=False)
    return int(each[rows].sum()) if len(each) else 0
