"""A Ray Data data set as numbered samples: written to Parquet once, read by number ever after."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray.data

from elastic_train.data.table import ParquetTable
from elastic_train.errors import DataMismatch
from elastic_train.storage.fsspec_store import open_store
from elastic_train.storage.store import Store

ROWS_PER_GROUP = 256
ROWS_PER_FILE = 65_536
DONE = "table.json"


def from_ray_data(dataset: ray.data.Dataset, url: str) -> ParquetTable:
    """The rows of a data set by number, as {column: value}; numpy arrays where the column has arrays.

    They are written below `url` in the data set's own order, and never again: where a whole table lies there
    already, that one is read and the data set is not executed, so that a run that is submitted again trains
    on the same samples. Raises DataMismatch if that table has other columns.
    """
    store = open_store(url)
    columns = tuple(dataset.columns() or ())
    names = ", ".join(columns)
    if store.exists(DONE):
        written = tuple(json.loads(store.read(DONE))["columns"])
        if written != columns:
            raise DataMismatch(
                field="dataset",
                problem=f"{url} holds the columns {', '.join(written)}, the data set has {names}.",
                remedy="Write it to another place.",
            )
    else:
        _write(dataset, store, columns)
    return ParquetTable(f"{url.rstrip('/')}/rows", columns=columns)


def _write(dataset: ray.data.Dataset, store: Store, columns: tuple[str, ...]) -> None:
    """Files of rows, then the marker that says that they are all there."""
    store.delete_tree("rows")  # of a try that did not get to its end
    rows = 0
    for number, tables in enumerate(_files(dataset)):
        with (
            store.stream(f"rows/{number:06}.parquet") as sink,
            pq.ParquetWriter(pa.PythonFile(_Written(sink), mode="w"), tables[0].schema) as writer,
        ):
            for table in tables:
                writer.write_table(table, row_group_size=ROWS_PER_GROUP)
                rows += len(table)
    store.create(DONE, json.dumps({"columns": columns, "rows": rows}).encode())


def _files(dataset: ray.data.Dataset) -> Iterator[list[pa.Table]]:
    """Tables of a row group each, as many as one file has."""
    before = dataset.context.execution_options.preserve_order
    dataset.context.execution_options.preserve_order = True
    try:
        kept: list[pa.Table] = []
        for batch in dataset.iter_batches(batch_size=ROWS_PER_GROUP, batch_format="numpy"):
            kept.append(pa.table({name: _column(np.asarray(values)) for name, values in batch.items()}))
            if len(kept) * ROWS_PER_GROUP >= ROWS_PER_FILE:
                yield kept
                kept = []
        if kept:
            yield kept
    finally:
        dataset.context.execution_options.preserve_order = before


def _column(values: np.ndarray) -> pa.Array:
    """One value per row; arrays of one shape as nested lists of fixed size, which any reader knows."""
    if values.ndim == 1:
        return pa.array(values.tolist() if values.dtype == object else values)
    inner: Any = pa.array(np.ascontiguousarray(values).reshape(-1))
    for size in reversed(values.shape[1:]):
        inner = pa.FixedSizeListArray.from_arrays(inner, size)
    return inner


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
