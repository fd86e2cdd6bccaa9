"""Megatron-LM's indexed data sets: a `.idx` file that says where documents of tokens lie in a `.bin` file.

The format is that of megatron/core/datasets/indexed_dataset.py: the magic, a version, the code of a dtype,
the numbers of sequences and of document ends, then their lengths, offsets and ends.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from elastic_train.data.listing import listing, opened, read
from elastic_train.errors import ConfigError

MAGIC = b"MMIDIDX\x00\x00"
_HEAD = struct.Struct("<9sQBQQ")
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}


class MegatronTokens:
    """Sequence i, int64 [its length]: documents as Megatron's preprocessing wrote them.

    `prefix` is the common path of the two files, without `.idx` or with it. `data.packing.Packed` makes
    windows of them.
    """

    draws_nothing = True

    def __init__(self, prefix: str | Path):
        self.prefix = str(prefix).removesuffix(".idx").removesuffix(".bin")
        self._index: _Index | None = None

    def __len__(self) -> int:
        return len(self._open().lengths)

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        found = self._open()
        if not 0 <= index < len(found.lengths):
            raise IndexError(f"sequence {index} of {len(found.lengths)}")
        start = int(found.offsets[index])
        stop = start + int(found.lengths[index]) * found.dtype.itemsize
        data = read(found.url, start, stop) if stop > start else b""
        return np.frombuffer(data, dtype=found.dtype).astype(np.int64)

    def describe(self) -> Any:
        """Names and sizes of the files, for the identity of the data."""
        found = self._open()
        return (Path(self.prefix).name, found.size, len(found.lengths), int(found.lengths.sum()))

    def _open(self) -> _Index:
        if self._index is None:
            self._index = _Index(self.prefix)
        return self._index

    def __getstate__(self) -> dict[str, Any]:
        return {"prefix": self.prefix, "_index": None}


class _Index:
    """What an index says, checked against the size of the data before anything is read of that."""

    def __init__(self, prefix: str) -> None:
        (index,), (data,) = (listing(f"{prefix}{end}").files() for end in (".idx", ".bin"))
        self.url, self.size = data.url, data.size
        with opened(index.url) as file:
            head = file.read(_HEAD.size)
            if len(head) < _HEAD.size or not head.startswith(MAGIC):
                raise _unlike(index.url, "it does not begin as one")
            _, version, code, sequences, ends = _HEAD.unpack(head)
            kind = _DTYPES.get(code)
            if version != 1 or kind is None or kind[-2] == "f":
                raise _unlike(index.url, f"its version is {version} and its dtype {code}")
            # The sizes of what follows, before memory is taken for it; multimodal ones have modes behind.
            if index.size - _HEAD.size < 12 * sequences + 8 * ends:
                raise _unlike(index.url, f"it is too short for {sequences} sequences")
            self.dtype = np.dtype(kind)
            self.lengths = np.frombuffer(file.read(4 * sequences), dtype="<i4").astype(np.int64)
            self.offsets = np.frombuffer(file.read(8 * sequences), dtype="<i8")
        stops = self.offsets + self.lengths * self.dtype.itemsize
        if sequences and (self.lengths.min() < 0 or self.offsets.min() < 0 or stops.max() > data.size):
            raise _unlike(index.url, f"its sequences lie outside of the {data.size} bytes of {data.url}")


def _unlike(url: str, problem: str) -> ConfigError:
    return ConfigError(
        field="data",
        problem=f"{url} is no index of Megatron's: {problem}.",
        remedy="Give the prefix of a .bin and an .idx file that preprocess_data.py wrote.",
    )
