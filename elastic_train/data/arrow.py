"""Rows of Arrow files by number, as Hugging Face's `save_to_disk` writes them: mapped, not read."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from elastic_train.data.listing import Listing, SourceFile, listing, opened
from elastic_train.data.local_files import existing
from elastic_train.data.table import value_of
from elastic_train.errors import ConfigError


class ArrowRows:
    """Row i over all files, as {column: value}; lists of numbers are numpy arrays of the column's type.

    A directory of `save_to_disk` gives the files that its state.json names, in their order, and not what
    caches lie beside them; where the data set was saved with a format's columns or chosen rows, those. Values
    are as they are stored: images and audio are not decoded, and transforms are not applied.
    """

    draws_nothing = True

    def __init__(
        self, places: str | Path | Sequence[str | Path] | Listing, *, columns: Sequence[str] | None = None
    ):
        saved = _saved(places)
        given = saved.columns if columns is None and saved is not None else columns
        self.columns = None if given is None else tuple(given)
        self._listing = listing(places if saved is None else saved.files, suffix=".arrow")
        self._chosen = None if saved is None or not saved.indices else listing(saved.indices, suffix=".arrow")
        self._forget()

    def __len__(self) -> int:
        self._open()
        if self._rows is not None:
            return len(self._rows)
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        if self._rows is not None:
            index = int(self._rows[index])
        place = int(np.searchsorted(self._ends, index, side="right"))
        batch = self._batches[place]
        at = index - (int(self._ends[place - 1]) if place else 0)
        return {
            name: value_of(batch.column(name)[at].as_py(), batch.schema.field(name).type)
            for name in (self.columns or batch.schema.names)
        }

    def describe(self) -> Any:
        """The columns, and names and sizes of the files, for the identity of the data."""
        files = tuple((file.name, file.size) for file in self._open())
        return (self.columns, files) if self._rows is None else (self.columns, files, self._rows)

    def _open(self) -> tuple[SourceFile, ...]:
        with self._lock:
            if self._files is not None:
                return self._files
            files = self._listing.files()
            self._batches = [batch for file in files for batch in _batches(file.url)]
            for batch in self._batches:
                self._check(batch.schema)
            self._ends = np.cumsum([batch.num_rows for batch in self._batches], dtype=np.int64)
            if self._chosen is not None:
                chosen = [batch for file in self._chosen.files() for batch in _batches(file.url)]
                self._rows = np.concatenate([batch.column("indices").to_numpy() for batch in chosen])
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
        self._rows: npt.NDArray[np.uint64] | None = None  # those that were chosen, in their order

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("columns", "_listing", "_chosen")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._forget()


def _batches(url: str) -> list[pa.RecordBatch]:
    """Of a file in Arrow's stream format, or its file format."""
    local = url.startswith("file://")
    with pa.memory_map(url.removeprefix("file://")) if local else opened(url) as source:
        try:
            return list(pa.ipc.open_stream(source))
        except pa.ArrowInvalid:
            source.seek(0)
        try:
            found = pa.ipc.open_file(source)
            return [found.get_batch(number) for number in range(found.num_record_batches)]
        except pa.ArrowInvalid as error:
            raise ConfigError(field="data", problem=f"{url} is no Arrow file: {error}.") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _Saved:
    """What a directory of `save_to_disk` says of itself: `indices` are files with the rows that were chosen,
    which older releases wrote beside the data."""

    files: list[str]
    indices: list[str]
    columns: list[str] | None


def _saved(places: Any) -> _Saved | None:
    """None for places that are something else."""
    path = existing(str(places)) if isinstance(places, str | Path) else None
    if path is None or not path.is_dir():
        return None
    splits, state = path / "dataset_dict.json", path / "state.json"
    if splits.is_file():
        names = _read(splits)["splits"]
        raise ConfigError(
            field="data",
            problem=f"{path} holds several data sets.",
            remedy=f"Give one of them: {', '.join(str(path / str(name)) for name in names)}.",
        )
    if not state.is_file():
        if (path / "dataset_info.json").is_file():
            raise ConfigError(
                field="data",
                problem=f"{path} is a cache of datasets, whose files are of several splits and steps.",
                remedy="Save the data set with save_to_disk, or give the files of one split.",
            )
        return None
    said = _read(state)
    return _Saved(
        files=[str(path / str(entry["filename"])) for entry in said["_data_files"]],
        indices=[str(path / str(entry["filename"])) for entry in said.get("_indices_data_files") or ()],
        columns=None if said.get("_output_all_columns") else said.get("_format_columns"),
    )


def _read(file: Path) -> dict[str, Any]:
    entry = "splits" if file.name == "dataset_dict.json" else "_data_files"
    try:
        found = json.loads(file.read_text())
        _ = list(found[entry])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(field="data", problem=f"{file} does not say its {entry}: {error!r}.") from error
    return found
