"""Lines of JSON by number: where each begins is found once, a sample then reads its line alone."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from elastic_train.data.listing import Listing, SourceFile, listing, opened, read, refuse_compressed
from elastic_train.errors import ConfigError

BLOCK = 4 << 20
_BLANK = np.isin(np.arange(256), list(b" \t\r\n"))


class JsonLines:
    """Row i over all files, as the value of its line; lines of blanks are left out.

    With `fields` a sample has these of an object's entries. Every process reads the files once, to number
    their lines: 8 bytes a line are kept.
    """

    draws_nothing = True

    def __init__(
        self, places: str | Path | Sequence[str | Path] | Listing, *, fields: Sequence[str] | None = None
    ):
        self.fields = None if fields is None else tuple(fields)
        self._listing = listing(places, suffix=".jsonl")
        self._forget()

    def __len__(self) -> int:
        self._open()
        return int(self._counts[-1]) if len(self._counts) else 0

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"line {index} of {len(self)}")
        number = int(np.searchsorted(self._counts, index, side="right"))
        at = index - (int(self._counts[number - 1]) if number else 0)
        file, (starts, ends) = self._open()[number], self._lines[number]
        try:
            value = json.loads(read(file.url, int(starts[at]), int(ends[at])))
        except ValueError as error:
            raise ConfigError(
                field="data",
                problem=f"the line at byte {int(starts[at])} of {file.url} is no JSON: {error}.",
                remedy="Each line has to be a value of its own: repair it, or, where the file is one array "
                "or one object on several lines, write its parts one a line.",
            ) from error
        return value if self.fields is None else self._chosen(value, file, int(starts[at]))

    def describe(self) -> tuple[tuple[str, int], ...]:
        """Names and sizes of the files, for the identity of the data."""
        return tuple((file.name, file.size) for file in self._open())

    def _chosen(self, value: Any, file: SourceFile, start: int) -> dict[str, Any]:
        assert self.fields is not None
        absent = [name for name in self.fields if not isinstance(value, dict) or name not in value]
        if absent:
            raise ConfigError(
                field="data", problem=f"the line at byte {start} of {file.url} has no {absent[0]!r}."
            )
        return {name: value[name] for name in self.fields}

    def _open(self) -> tuple[SourceFile, ...]:
        with self._lock:
            if self._files is not None:
                return self._files
            files = self._listing.files()
            refuse_compressed(files)
            self._lines = [_lines(file.url) for file in files]
            self._counts = np.cumsum([len(starts) for starts, _ in self._lines], dtype=np.int64)
            self._files = files
            return files

    def _forget(self) -> None:
        """The state before first use, which is also what a pickle becomes."""
        self._lock = threading.RLock()
        self._files: tuple[SourceFile, ...] | None = None
        self._lines: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = []
        self._counts = np.zeros(0, dtype=np.int64)

    def __getstate__(self) -> dict[str, Any]:
        return {"fields": self.fields, "_listing": self._listing}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.fields, self._listing = state["fields"], state["_listing"]
        self._forget()


def _lines(url: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """First byte of each line that holds more than blanks, and the one behind it."""
    breaks: list[npt.NDArray[np.int64]] = []
    inked: list[npt.NDArray[np.int64]] = []  # bytes that are no blanks before each break
    size = ink = 0
    with opened(url) as file:
        while block := file.read(BLOCK):
            data = np.frombuffer(block, dtype=np.uint8)
            found = np.flatnonzero(data == ord("\n"))
            summed = np.cumsum(~_BLANK[data])
            breaks.append(found + size)
            inked.append(summed[found] + ink)
            size, ink = size + len(block), ink + int(summed[-1])
    ends = np.concatenate([*breaks, [size]]).astype(np.int64)
    starts = np.concatenate(([0], ends[:-1] + 1))
    whole = np.diff(np.concatenate([*inked, [ink]]), prepend=0) > 0
    return starts[whole], ends[whole]
