"""Rows of Parquet files by number, found through row-group counts alone."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from elastic_train.data.listing import Listing, SourceFile, listing, opened
from elastic_train.data.tokenizer import PAD, encode
from elastic_train.errors import ConfigError

KEPT_GROUPS = 8
"""Decoded row groups that stay in memory. A shuffled order reads a group for most rows: write small ones."""


class ParquetRows:
    """Row i of one column over all files, as a Python value."""

    draws_nothing = True

    def __init__(self, places: str | Path | Sequence[str | Path] | Listing, *, column: str):
        self.column = column
        self._listing = listing(places, suffix=".parquet")
        self._forget()

    def __len__(self) -> int:
        with self._lock:
            self._open()
            return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        with self._lock:
            place = int(np.searchsorted(self._ends, index, side="right"))
            first = int(self._ends[place - 1]) if place else 0
            return self._group(place)[index - first].as_py()

    def describe(self) -> tuple[tuple[str, int], ...]:
        """Names and sizes of the files, for the identity of the data."""
        with self._lock:
            return tuple((file.name, file.size) for file in self._open())

    def check(self, accepts: str, matches: bool) -> None:
        """Refuse a column that does not hold what the source reads."""
        if not matches:
            raise ConfigError(
                field="data",
                problem=f"column {self.column!r} is {self.type}, {accepts} is needed.",
                remedy="",
            )

    @property
    def type(self) -> pa.DataType:
        """Arrow type of the column."""
        with self._lock:
            self._open()
            assert self._type is not None
            return self._type

    def _open(self) -> tuple[SourceFile, ...]:
        if self._files is not None:
            return self._files
        files, places, counts = self._listing.files(), [], []
        for number, file in enumerate(files):
            with opened(file.url) as handle, pq.ParquetFile(handle) as parquet:
                schema = parquet.schema_arrow
                if self.column not in schema.names:
                    raise ConfigError(
                        field="data",
                        problem=f"{file.url} has no column {self.column!r}.",
                        remedy=f"Its columns are {', '.join(schema.names)}.",
                    )
                self._type = schema.field(self.column).type
                for group in range(parquet.num_row_groups):
                    places.append((number, group))
                    counts.append(parquet.metadata.row_group(group).num_rows)
        self._places, self._ends, self._files = tuple(places), np.cumsum(counts, dtype=np.int64), files
        return files

    def _group(self, place: int) -> pa.ChunkedArray:
        if place in self._groups:
            self._groups.move_to_end(place)
            return self._groups[place]
        number, group = self._places[place]
        with opened(self._open()[number].url) as handle, pq.ParquetFile(handle) as parquet:
            column = parquet.read_row_group(group, columns=[self.column]).column(0)
        self._groups[place] = column
        if len(self._groups) > KEPT_GROUPS:
            self._groups.popitem(last=False)
        return column

    def _forget(self) -> None:
        """The state before first use, which is also what a pickle becomes."""
        self._lock = threading.RLock()
        self._files: tuple[SourceFile, ...] | None = None
        self._type: pa.DataType | None = None
        self._places: tuple[tuple[int, int], ...] = ()  # (file, row group)
        self._ends = np.zeros(0, dtype=np.int64)  # of each row group in the numbering
        self._groups: OrderedDict[int, pa.ChunkedArray] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {"column": self.column, "_listing": self._listing}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.column, self._listing = state["column"], state["_listing"]
        self._forget()


class ParquetTokens:
    """A column of token id lists: row i as int64 [seq_len + 1], cut at its end or filled up with padding."""

    draws_nothing = True

    def __init__(
        self,
        places: str | Path | Sequence[str | Path] | Listing,
        *,
        seq_len: int,
        column: str = "tokens",
        pad: int = PAD,
    ):
        self.rows, self.seq_len, self.pad = ParquetRows(places, column=column), seq_len, pad

    def __len__(self) -> int:
        kind = self.rows.type
        lists = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
        self.rows.check("a list of integers", lists and pa.types.is_integer(kind.value_type))
        return len(self.rows)

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        row = self.rows[index] or []
        if None in row:
            raise ConfigError(
                field="data",
                problem=f"row {index} of column {self.rows.column!r} has a null among its tokens.",
                remedy="Write the table without it.",
            )
        return fit(np.asarray(row, dtype=np.int64), self.seq_len + 1, self.pad)

    def describe(self) -> tuple[tuple[str, int], ...]:
        return self.rows.describe()


class ParquetText:
    """A column of texts: row i as byte tokens with begin and end, int64 [seq_len + 1], cut or filled up."""

    draws_nothing = True

    def __init__(
        self, places: str | Path | Sequence[str | Path] | Listing, *, seq_len: int, column: str = "text"
    ):
        self.rows, self.seq_len = ParquetRows(places, column=column), seq_len

    def __len__(self) -> int:
        kind = self.rows.type
        self.rows.check("text", pa.types.is_string(kind) or pa.types.is_large_string(kind))
        return len(self.rows)

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        return fit(encode(self.rows[index] or "", bos=True, eos=True), self.seq_len + 1, PAD)

    def describe(self) -> tuple[tuple[str, int], ...]:
        return self.rows.describe()


def fit(tokens: npt.NDArray[np.int64], length: int, pad: int) -> npt.NDArray[np.int64]:
    """Tokens at exactly this length: the rest cut away, or padding behind them."""
    fitted = np.full(length, pad, dtype=np.int64)
    fitted[: len(tokens)] = tokens[:length]
    return fitted
