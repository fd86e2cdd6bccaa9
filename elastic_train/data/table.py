"""Rows of Parquet files with several columns, by number."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from elastic_train.data.listing import Listing
from elastic_train.data.parquet import ParquetRows
from elastic_train.errors import ConfigError


class ParquetTable:
    """Row i over all files, as {column: value}. Lists of numbers are numpy arrays of the column's type."""

    draws_nothing = True

    def __init__(self, places: str | Path | Sequence[str | Path] | Listing, *, columns: Sequence[str]):
        if not columns:
            raise ConfigError(field="data", problem="a table without columns has no samples.")
        self.columns = {name: ParquetRows(places, column=name) for name in columns}

    def __len__(self) -> int:
        return len(self._first)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: value_of(rows[index], rows.type) for name, rows in self.columns.items()}

    def describe(self) -> Any:
        """The columns, and names and sizes of the files."""
        return (tuple(self.columns), self._first.describe())

    @property
    def _first(self) -> ParquetRows:
        return next(iter(self.columns.values()))


def value_of(value: Any, kind: pa.DataType) -> Any:
    """A value as a sample has it: numbers in an array of their type."""
    if not isinstance(value, list):
        return value
    while pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        kind = kind.value_type
    numbers = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    return np.asarray(value, dtype=kind.to_pandas_dtype()) if numbers else value
