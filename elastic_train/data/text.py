"""Plain text files as one stream of byte tokens, cut into windows of equal length."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from elastic_train.data.listing import Listing, SourceFile, listing, read, refuse_compressed
from elastic_train.data.tokenizer import EOS, PAD, encode
from elastic_train.errors import ConfigError, DataMismatch


class TextFiles:
    """Window i of the files' bytes, int64 [seq_len + 1], each file followed by an end token.

    Windows overlap by one token, so that every token but the first is predicted once; the last is filled up
    with padding. Files are listed at first use, only the bytes of a window are read, and a pickle holds the
    places alone: every process lists for itself, and the identity of the data shows where lists differ.
    """

    draws_nothing = True

    def __init__(
        self, places: str | Path | Sequence[str | Path] | Listing, *, seq_len: int, suffix: str = ""
    ):
        if seq_len < 1:
            raise ConfigError(field="seq_len", problem=f"must be positive, got {seq_len}.")
        self.seq_len = seq_len
        self._listing = listing(places, suffix=suffix)
        self._files: tuple[SourceFile, ...] | None = None
        self._ends = np.zeros(0, dtype=np.int64)  # of each file in the stream, its end token included

    def __len__(self) -> int:
        self._open()
        return -(-(int(self._ends[-1]) - 1) // self.seq_len)

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        files = self._open()
        start = index * self.seq_len
        stop = min(start + self.seq_len + 1, int(self._ends[-1]))
        window = np.full(self.seq_len + 1, PAD, dtype=np.int64)
        at = start
        while at < stop:
            number = int(np.searchsorted(self._ends, at, side="right"))
            end = int(self._ends[number])
            part = self._tokens(files[number], at - (end - files[number].size - 1), min(stop, end) - at)
            window[at - start : at - start + len(part)] = part
            at += len(part)
        return window

    def describe(self) -> tuple[tuple[str, int], ...]:
        """Names and sizes of the files, for the identity of the data."""
        return tuple((file.name, file.size) for file in self._open())

    def _open(self) -> tuple[SourceFile, ...]:
        if self._files is None:
            files = self._listing.files()
            refuse_compressed(files)
            self._ends = np.cumsum([file.size + 1 for file in files], dtype=np.int64)
            self._files = files
        return self._files

    def _tokens(self, file: SourceFile, start: int, count: int) -> npt.NDArray[np.int64]:
        """Tokens start .. start+count-1 of a file; the one behind its last byte is the end token."""
        stop = min(start + count, file.size)
        data = read(file.url, start, stop) if stop > start else b""
        if len(data) != stop - start:
            raise DataMismatch(
                field="data",
                problem=f"{file.url} had {file.size} bytes when it was listed and is shorter now.",
                remedy="Restore the file; a run's data must not change while it trains.",
            )
        tokens = encode(data)
        return tokens if len(tokens) == count else np.append(tokens, EOS)

    def __getstate__(self) -> dict[str, Any]:
        return {"seq_len": self.seq_len, "_listing": self._listing, "_files": None, "_ends": self._ends[:0]}
