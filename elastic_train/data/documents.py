"""Texts as documents of byte tokens, by number: what is packed into windows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from elastic_train.data.listing import Listing, SourceFile, listing, read
from elastic_train.data.numbered import NumberedSamples, numbered
from elastic_train.data.parquet import ParquetRows
from elastic_train.data.tokenizer import encode


class Documents:
    """Text i of a numbered source, a str or bytes, as int64 [its length + 2] with begin and end."""

    def __init__(self, texts: NumberedSamples):
        self.texts = numbered(texts)
        self.draws_nothing = bool(getattr(texts, "draws_nothing", False))

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        return encode(self.texts[index] or "", bos=True, eos=True)

    def describe(self) -> Any:
        describe = getattr(self.texts, "describe", None)
        return describe() if callable(describe) else None


def documents_of(places: str | Path | Sequence[str | Path] | Listing) -> Documents:
    """The files below some places, or the rows of a Parquet file's column `text`."""
    table = isinstance(places, str | Path) and str(places).endswith(".parquet")
    return Documents(ParquetRows(places, column="text") if table else FileTexts(places))


class FileTexts:
    """File i of a listing, whole, as bytes. A pickle holds the places alone."""

    draws_nothing = True

    def __init__(self, places: str | Path | Sequence[str | Path] | Listing, *, suffix: str = ""):
        self._listing = listing(places, suffix=suffix)
        self._files: tuple[SourceFile, ...] | None = None

    def __len__(self) -> int:
        return len(self._open())

    def __getitem__(self, index: int) -> bytes:
        file = self._open()[index]
        return read(file.url, 0, file.size) if file.size else b""

    def describe(self) -> tuple[tuple[str, int], ...]:
        """Names and sizes of the files, for the identity of the data."""
        return tuple((file.name, file.size) for file in self._open())

    def _open(self) -> tuple[SourceFile, ...]:
        if self._files is None:
            self._files = self._listing.files()
        return self._files

    def __getstate__(self) -> dict[str, Any]:
        return {"_listing": self._listing, "_files": None}
