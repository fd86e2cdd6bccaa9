"""A Ray Data data set as numbered samples: written to Parquet once, read by number ever after."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray.data
from ray.data.block import BlockAccessor
from ray.exceptions import RayTaskError

from elastic_train.cluster.ray_calls import FETCH_S, LOOK_S, answer, remote
from elastic_train.data.table import ParquetTable, is_list
from elastic_train.errors import AlreadyExists, DataMismatch, StorageError
from elastic_train.storage.fsspec_store import open_store
from elastic_train.storage.store import Store

ROWS_PER_GROUP = 256
ROWS_PER_FILE = 65_536
BYTES_PER_FILE = 128 << 20
WRITERS = 8
"""How many files are written at a time."""
DONE = "table.json"
ROWS = "rows"
"""Begins the directories of rows. The marker names the one that is the table."""


def from_ray_data(dataset: ray.data.Dataset, url: str) -> ParquetTable:
    """The rows of a data set by number, as {column: value}; numpy arrays where the column has arrays.

    They are written below `url` in the data set's own order, by tasks on the nodes that hold its blocks, and
    never again: where a whole table lies there already, that one is read and the data set is not executed, so
    that a run that is submitted again trains on the same samples. Of several calls at the same time each
    executes it, and all read what the first one wrote. Integers stay integers where some are missing, which
    are None. Raises DataMismatch if that table has other columns, blocks differ in a column's type or Arrow
    has none for it, and StorageError if the nodes don't share the place.
    """
    store = open_store(url)
    columns = tuple(dataset.columns() or ())
    table = _table(store) if store.exists(DONE) else _write(dataset, store, columns)
    if table.columns != columns:
        raise DataMismatch(
            field="dataset",
            problem=f"{url} holds the columns {', '.join(table.columns)}, the data set has "
            f"{', '.join(columns)}.",
            remedy="Write it to another place.",
        )
    return ParquetTable(f"{url.rstrip('/')}/{table.directory}", columns=columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Table:
    """What the marker says."""

    columns: tuple[str, ...]
    directory: str


def _table(store: Store) -> _Table:
    said = json.loads(store.read(DONE))
    return _Table(columns=tuple(said["columns"]), directory=said.get("directory", ROWS))


@dataclass(kw_only=True)
class _File:
    """Blocks whose rows are one file, as references, and which rows of each: (start, stop), None for all."""

    blocks: list[Any] = field(default_factory=list[Any])
    spans: list[tuple[int, int | None]] = field(default_factory=list[tuple[int, int | None]])
    rows: int = 0
    size: int = 0


def _write(dataset: ray.data.Dataset, store: Store, columns: tuple[str, ...]) -> _Table:
    """Files of rows, then the marker that says that they are all there; the table of whoever set it first.

    Each call has a directory of its own: a data set that shuffles gives other rows each time, and files of
    two calls would not be its rows.
    """
    own = f"{ROWS}-{secrets.token_hex(4)}"
    try:
        rows = _write_rows(dataset, store, own)
        with suppress(AlreadyExists):
            said = {"columns": columns, "rows": rows, "directory": own}
            store.create(DONE, json.dumps(said).encode())
        table = _table(store)
    except StorageError:
        if not store.exists(DONE):
            raise
        table = _table(store)  # whoever was first took away what the others had begun
    others = {path.partition("/")[0] for path in store.list() if path.startswith(ROWS)} - {table.directory}
    for left in sorted(others if table.directory == own else others & {own}):
        store.delete_tree(left)
    return table


def _write_rows(dataset: ray.data.Dataset, store: Store, directory: str) -> int:
    """How many there are."""
    write, under_way = remote(_write_file, num_cpus=0), dict[Any, str]()
    rows, schemas = dict[str, int](), dict[str, pa.Schema]()

    def gather(most: int) -> None:
        while len(under_way) > most:
            for call in ray.wait([*under_way], timeout=LOOK_S)[0]:
                path, (count, schema) = under_way.pop(call), _written(call)
                if count:
                    rows[path], schemas[path] = count, schema

    try:
        for number, file in enumerate(_files(dataset)):
            path = f"{directory}/{number:06}.parquet"
            under_way[write.remote(store.url, path, file.spans, *file.blocks)] = path
            gather(WRITERS - 1)
        gather(0)
    finally:  # where one failed, the others write no more into a directory that is taken away
        if under_way:
            ray.wait([*under_way], num_returns=len(under_way), timeout=FETCH_S)
    for schema in schemas.values():
        _same(schemas[min(schemas)], schema)
    if lacking := [*sorted(rows.keys() - set(store.list(directory)))]:
        problem = "a task of another process wrote it, and it is not there: use storage that all nodes share."
        raise StorageError(path=f"{store.url}/{lacking[0]}", operation="read", problem=problem)
    return sum(rows.values())


def _written(call: Any) -> tuple[int, pa.Schema]:
    """What a task that has ended tells of its file; what it raised where it failed."""
    try:
        return answer(call, FETCH_S)
    except RayTaskError as error:
        raise error.cause from error


def _files(dataset: ray.data.Dataset) -> Iterator[_File]:
    """The data set's blocks in its order, while it is executed, as many as one file has. They stay where they
    are.
    """
    before = dataset.context.execution_options.preserve_order
    dataset.context.execution_options.preserve_order = True
    try:
        file = _File()
        for bundle in dataset.iter_internal_ref_bundles():
            for entry, part in zip(bundle.blocks, bundle.slices or [None] * len(bundle.blocks), strict=True):
                span = (part.start_offset, part.end_offset) if part else (0, entry.metadata.num_rows)
                if span[1] is not None and span[1] <= span[0]:
                    continue
                file.blocks.append(entry.ref)
                file.spans.append(span)
                file.rows += (span[1] or ROWS_PER_FILE) - span[0]
                file.size += entry.metadata.size_bytes or 0
                if file.rows >= ROWS_PER_FILE or file.size >= BYTES_PER_FILE:
                    yield file
                    file = _File()
        if file.blocks:
            yield file
    finally:
        dataset.context.execution_options.preserve_order = before


def _write_file(
    url: str, path: str, spans: Sequence[tuple[int, int | None]], *blocks: Any
) -> tuple[int, pa.Schema]:
    """Write rows of blocks as one file, in the process of a task; how many they are, and what they are."""
    tables = _tables(spans, blocks)
    table, rows = next(tables, None), 0
    if table is None:
        return 0, pa.schema([])
    schema = table.schema
    with (
        open_store(url).stream(path) as sink,
        pq.ParquetWriter(pa.PythonFile(_Written(sink), mode="w"), schema) as writer,
    ):
        while table is not None:
            _same(schema, table.schema)
            writer.write_table(table, row_group_size=ROWS_PER_GROUP)
            rows, table = rows + len(table), next(tables, None)
    return rows, schema


def _tables(spans: Sequence[tuple[int, int | None]], blocks: Sequence[Any]) -> Iterator[pa.Table]:
    """A table for each row group. A block's last one has what is left."""
    for (first, last), block in zip(spans, blocks, strict=True):
        held = BlockAccessor.for_block(block)
        end = held.num_rows() if last is None else last
        for start in range(first, end, ROWS_PER_GROUP):
            part = held.slice(start, min(start + ROWS_PER_GROUP, end))
            batch: Any = BlockAccessor.for_block(part).to_batch_format("numpy")
            exact = _integers_with_nulls(part)
            columns = {n: _named(n, np.asarray(v)) for n, v in batch.items() if n not in exact}
            yield pa.table({name: exact.get(name, columns.get(name)) for name in batch})


def _integers_with_nulls(block: Any) -> dict[str, pa.Array]:
    """Columns that numpy has no type for but float64, in which integers beyond 2^53 are others."""
    if not isinstance(block, pa.Table):  # a frame, which has no other columns of integers with nulls
        integers = [name for name in block if getattr(block[name].dtype, "kind", "") in {"i", "u"}]
        block = pa.Table.from_pandas(block[integers], preserve_index=False)
    table, found = block, dict[str, pa.Array]()
    for name, column in zip(table.column_names, table.columns, strict=True):
        kind, chunks = column.type, column.chunks
        while is_list(kind):
            kind, chunks = kind.value_type, [chunk.flatten() for chunk in chunks]
        if pa.types.is_integer(kind) and any(chunk.null_count for chunk in chunks):
            found[name] = pa.array(column.to_pylist(), _lists(column.type))
    return found


def _lists(kind: pa.DataType) -> pa.DataType:
    """The same numbers in plain lists, as other rows of the column are written."""
    return pa.list_(_lists(kind.value_type)) if is_list(kind) else kind


def _named(name: str, values: np.ndarray) -> pa.Array:
    """DataMismatch where Arrow has no type for values of the column."""
    try:
        return _column(values)
    except (pa.ArrowException, OverflowError) as error:
        raise DataMismatch(
            field="dataset",
            problem=f"column {name!r} cannot be written: {error}",
            remedy="Give all its values one type; make lists, a struct or a text of a map.",
        ) from error


def _column(values: np.ndarray) -> pa.Array:
    """One value per row; arrays as nested lists, which any reader knows, of one shape or not."""
    if values.ndim == 1:
        return pa.array(values.tolist() if values.dtype == object else values)
    inner: Any = pa.array(np.ascontiguousarray(values).reshape(-1))
    for axis in reversed(range(1, values.ndim)):
        lists, size = int(np.prod(values.shape[:axis])), values.shape[axis]
        inner = pa.ListArray.from_arrays(pa.array(np.arange(lists + 1) * size, pa.int32()), inner)
    return inner


def _same(first: pa.Schema, other: pa.Schema) -> None:
    """DataMismatch where a column has another type than in the first rows."""
    for name in first.names:
        if first.field(name).type != other.field(name).type:
            raise DataMismatch(
                field="dataset",
                problem=f"column {name!r} is {first.field(name).type} in some rows and "
                f"{other.field(name).type} in others.",
                remedy="Cast it in the data set, and fill in what is missing.",
            )


class _Written:
    """What pyarrow wants of a file that is written from its begin to its end."""

    closed = False

    def __init__(self, sink: Any) -> None:
        self._sink, self._at = sink, 0

    def write(self, data: Any) -> int:
        self._sink.write(data)
        self._at += len(data)
        return len(data)

    def tell(self) -> int:
        return self._at

    def flush(self) -> None:
        return None
