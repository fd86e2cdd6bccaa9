"""Lazy reading of a large manifest: its index of tensors first, then groups of rows on demand.

A checkpoint of a million fragments opens in the time that its list of tensors takes.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from elastic_train.checkpoint.validate.manifest_index import read_index
from elastic_train.checkpoint.validate.manifest_parquet import Parquet
from elastic_train.errors import TensorMismatch
from elastic_train.geometry.fragments import Fragments

ROWS = 16_384
"""Rows of a group, the least that is decoded at once."""

Ints = npt.NDArray[np.int64]


def encode_index(fragments: Fragments) -> str | None:
    """Each tensor with its first row and the number of its rows; None where these aren't together."""
    key = fragments.key
    heads = np.flatnonzero(np.diff(key, prepend=-1))
    if len(heads) != len(fragments.names):
        return None
    counts = np.diff(heads, append=len(key)).tolist()
    words = [
        [*fragments.names[k], fragments.dtypes[k], fragments.shapes[k], first, count]
        for k, first, count in zip(key[heads].tolist(), heads.tolist(), counts, strict=True)
    ]
    return json.dumps(words, separators=(",", ":"), ensure_ascii=False)


class Pages:
    """Safe to use from several threads. What was decoded is kept."""

    def __init__(self, file: Parquet, schema: pa.Schema, index: str, *, url: str) -> None:
        self._file, self._schema, self._url = file, schema, url
        self._starts: Ints = np.concatenate([[0], np.cumsum(file.group_rows)]).astype(np.int64)
        said = read_index(index, len(self), url=url)
        self.names, self.dtypes, self.shapes = said.names, said.dtypes, said.shapes
        self.firsts: Ints = np.array(said.firsts, dtype=np.int64)
        self._decoded: dict[int, pa.Table] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return int(self._starts[-1])

    def keys(self, rows: Sequence[int]) -> list[int]:
        """The tensors that these rows are of."""
        places = np.searchsorted(self.firsts, np.asarray(rows, dtype=np.int64), side="right") - 1
        return np.unique(places).tolist()

    def whole(self) -> pa.Table:
        """All rows, their text as numbers of its distinct values. They aren't kept."""
        groups = range(len(self._starts) - 1)  # one by one: what is decoded of all together is twice as much
        return pa.concat_tables([self._file.read([n], coded=True) for n in groups]).unify_dictionaries()

    def column(self, name: str) -> pa.ChunkedArray:
        """One column of all rows, without the others."""
        return self._file.read(columns=[name]).column(name)

    def take(self, rows: Sequence[int]) -> pa.Table:
        """These rows, in this order."""
        places = np.asarray(rows, dtype=np.int64)
        group = np.searchsorted(self._starts, places, side="right") - 1
        wanted, at = np.unique(group, return_inverse=True)
        if not len(wanted):
            return self._schema.empty_table()
        sizes = self._starts[wanted + 1] - self._starts[wanted]
        begins = np.cumsum(sizes) - sizes
        return self._groups(wanted.tolist()).take(pa.array(places - self._starts[group] + begins[at]))

    def tensor(self, key: int) -> tuple[Ints, pa.Table]:
        """The rows of one tensor: their places and themselves. They must be what the index says."""
        first = int(self.firsts[key])
        count = int(self.firsts[key + 1]) - first
        start = int(np.searchsorted(self._starts, first, side="right")) - 1
        stop = int(np.searchsorted(self._starts, first + count, side="left"))
        table = self._groups(range(start, stop)).slice(first - int(self._starts[start]), count)
        name = {"tensor": self.names[key][0], "state": self.names[key][1], "dtype": self.dtypes[key]}
        if any(table.column(c).unique().to_pylist() != [value] for c, value in name.items()):
            raise TensorMismatch(
                url=self._url,
                problem=f"{self.names[key]} isn't what the manifest's index says; save it again.",
            )
        return np.arange(first, first + count, dtype=np.int64), table

    def _groups(self, numbers: Sequence[int]) -> pa.Table:
        with self._lock:
            missing = [n for n in numbers if n not in self._decoded]
            for number in missing:
                self._decoded[number] = self._file.read([number])
            return pa.concat_tables([self._decoded[n] for n in numbers])
