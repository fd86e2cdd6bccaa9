"""Rows of Arrow files by number, as Hugging Face's `save_to_disk` writes them: mapped, not read."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from elastic_train.data.listing import Listing, SourceFile, listing, opened
from elastic_train.data.local_files import existing
from elastic_train.data.table import value_of
from elastic_train.errors import ConfigError


class ArrowRows:
    """Row i over all files, as {column: value}; lists of numbers are numpy arrays of the column's type.

    A directory of `save_to_disk` gives the files that its state.json names, in their order, and not what
    caches lie beside them. Values are as they are stored: images and audio are not decoded.
    """

    draws_nothing = True

    def __init__(
        self, places: str | Path | Sequence[str | Path] | Listing, *, columns: Sequence[str] | None = None
    ):
        self.columns = None if columns is None else tuple(columns)
        self._listing = listing(_saved(places), suffix=".arrow")
        self._forget()

    def __len__(self) -> int:
        self._open()
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        place = int(np.searchsorted(self._ends, index, side="right"))
        batch = self._batches[place]
        at = index - (int(self._ends[place - 1]) if place else 0)
        return {
            name: value_of(batch.column(name)[at].as_py(), batch.schema.field(name).type)
            for name in (self.columns or batch.schema.names)
        }

    def describe(self) -> Any:
        """The columns, and names and sizes of the files, for the identity of the data."""
        return (self.columns, tuple((file.name, file.size) for file in self._open()))

    def _open(self) -> tuple[SourceFile, ...]:
        with self._lock:
            if self._files is not None:
                return self._files
            files = self._listing.files()
            self._batches = [batch for file in files for batch in _batches(file.url)]
            for batch in self._batches:
                self._check(batch.schema)
            self._ends = np.cumsum([batch.num_rows for batch in self._batches], dtype=np.int64)
            self._files = files
            return files

    def _check(self, schema: pa.Schema) -> None:
        absent = [name for name in self.columns or () if name not in schema.names]
        if absent:
            raise ConfigError(
                field="data",
                problem=f"there is no column {absent[0]!r}.",
                remedy=f"The columns are {', '.join(schema.names)}.",
            )

    def _forget(self) -> None:
        """The state before first use, which is also what a pickle becomes."""
        self._lock = threading.RLock()
        self._files: tuple[SourceFile, ...] | None = None
        self._batches: list[pa.RecordBatch] = []
        self._ends = np.zeros(0, dtype=np.int64)

    def __getstate__(self) -> dict[str, Any]:
        return {"columns": self.columns, "_listing": self._listing}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.columns, self._listing = state["columns"], state["_listing"]
        self._forget()


def _batches(url: str) -> list[pa.RecordBatch]:
    """Of a file in Arrow's stream format, or its file format."""
    source = (
        pa.memory_map(url.removeprefix("file://")) if url.startswith("file://") else opened(url).__enter__()
    )
    try:
        return list(pa.ipc.open_stream(source))
    except pa.ArrowInvalid:
        source.seek(0)
    try:
        found = pa.ipc.open_file(source)
        return [found.get_batch(number) for number in range(found.num_record_batches)]
    except pa.ArrowInvalid as error:
        raise ConfigError(field="data", problem=f"{url} is no Arrow file: {error}.") from error


def _saved(places: Any) -> Any:
    """The files of a directory of `save_to_disk`; other places as they are."""
    path = existing(str(places)) if isinstance(places, str | Path) else None
    if path is None or not path.is_dir():
        return places
    splits, state = path / "dataset_dict.json", path / "state.json"
    if splits.is_file():
        names = _read(splits, "splits")
        raise ConfigError(
            field="data",
            problem=f"{path} holds several data sets.",
            remedy=f"Give one of them: {', '.join(str(path / str(name)) for name in names)}.",
        )
    if not state.is_file():
        return places
    return [str(path / str(entry["filename"])) for entry in _read(state, "_data_files")]


def _read(file: Path, entry: str) -> list[Any]:
    try:
        found = json.loads(file.read_text())[entry]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(field="data", problem=f"{file} does not say its {entry}: {error!r}.") from error
    return list(found)
