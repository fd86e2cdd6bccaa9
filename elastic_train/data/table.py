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
    """A value as a sample has it: numbers of a list, at any depth, in an array of their type.

    Where lists within a list differ in length, or some number is absent, the outer one stays a list.
    """
    if isinstance(kind, pa.BaseExtensionType):  # whether somebody registered it must not show
        kind = kind.storage_type
    if isinstance(value, dict) and pa.types.is_struct(kind):
        return {field.name: value_of(value[field.name], field.type) for field in kind}
    if not isinstance(value, list) or not is_list(kind):
        return value
    if not value or not is_list(kind.value_type):
        dtype = _number(kind)
        if dtype is None:
            return [value_of(part, kind.value_type) for part in value]
        return value if None in value else np.asarray(value, dtype=dtype)
    parts = [value_of(part, kind.value_type) for part in value]
    arrays = all(isinstance(part, np.ndarray) and part.shape == parts[0].shape for part in parts)
    return np.stack(parts) if arrays else parts


def is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _number(kind: pa.DataType) -> Any:
    """The dtype of the numbers that lists of this type hold, at whatever depth; None if others."""
    while is_list(kind):
        kind = kind.value_type
    numbers = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    return kind.to_pandas_dtype() if numbers else None
