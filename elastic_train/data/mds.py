"""MosaicML's MDS shards by number: an index.json names the shards, and each says where its samples lie.

The format is that of streaming/base/format/mds in the library of that name: a shard is the number of its
samples, their offsets (uint32) and the samples; a sample is the sizes of its columns of no fixed size, then
the values.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from elastic_train.data.listing import SourceFile, listing, read, spelled_out
from elastic_train.data.mds_values import decoder_of
from elastic_train.errors import ConfigError, DataMismatch


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shard:
    """One entry of an index: its file, samples, and columns as (name, encoding, size or None)."""

    file: SourceFile
    samples: int
    columns: tuple[tuple[str, str, int | None], ...]


class MDSRows:
    """Sample i over all shards of one or several directories that MDSWriter wrote, as {column: value}.

    Values are those that the library decodes. Pickled columns run code when they are read, so they are
    refused unless `decoders` has a function for their encoding: {"pkl": pickle.loads}; others of the job's
    own are given there too. Order and contents are those of `StreamingDataset(shuffle=False)`. Compressed
    shards are refused: they have to be decompressed once, beside the index.
    """

    draws_nothing = True

    def __init__(
        self,
        places: str | Path | Sequence[str | Path],
        *,
        columns: Sequence[str] | None = None,
        decoders: Mapping[str, Callable[[bytes], Any]] | None = None,
    ):
        several = [places] if isinstance(places, str | Path) else places
        self.places = tuple(each for place in several for each in spelled_out(str(place)))
        self.columns = None if columns is None else tuple(columns)
        self.decoders = dict(decoders or {})
        self._forget()

    def __len__(self) -> int:
        self._open()
        return int(self._counts[-1]) if len(self._counts) else 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        number = int(np.searchsorted(self._counts, index, side="right"))
        at = index - (int(self._counts[number - 1]) if number else 0)
        shard, offsets = self._open()[number], self._offsets_of(number)
        start, stop = int(offsets[at]), int(offsets[at + 1])
        data = read(shard.file.url, start, stop)
        if len(data) != stop - start:
            raise _changed(shard, "is shorter than its offsets say")
        return self._decoded(shard, data)

    def describe(self) -> Any:
        """The columns, and names and sizes of the shards, for the identity of the data."""
        return (self.columns, tuple((shard.file.name, shard.file.size) for shard in self._open()))

    def _decoded(self, shard: _Shard, data: bytes) -> dict[str, Any]:
        free = [name for name, _, size in shard.columns if not size]
        sizes = dict(zip(free, np.frombuffer(data, dtype="<u4", count=len(free)).tolist(), strict=True))
        at, found = 4 * len(free), dict[str, Any]()
        for name, encoding, size in shard.columns:
            length = size or sizes[name]
            if self.columns is None or name in self.columns:
                found[name] = decoder_of(encoding, name, self.decoders)(data[at : at + length])
            at += length
        return found

    def _offsets_of(self, number: int) -> npt.NDArray[np.int64]:
        """First byte of each sample of a shard, and the one behind the last; read at first use."""
        if number not in self._offsets:
            shard = self._open()[number]
            head = read(shard.file.url, 0, 4 * (shard.samples + 2))
            offsets = np.frombuffer(head[: len(head) // 4 * 4], dtype="<u4").astype(np.int64)
            if len(offsets) != shard.samples + 2 or offsets[0] != shard.samples:
                raise _changed(shard, f"has not the {shard.samples} samples that its index says")
            self._offsets[number] = offsets[1:]
        return self._offsets[number]

    def _open(self) -> tuple[_Shard, ...]:
        with self._lock:
            if self._shards is not None:
                return self._shards
            shards = [shard for place in self.places for shard in _shards_of(place)]
            for shard in shards:
                self._check(shard)
            self._counts = np.cumsum([shard.samples for shard in shards], dtype=np.int64)
            self._shards = tuple(shards)
            return self._shards

    def _check(self, shard: _Shard) -> None:
        names = [name for name, _, _ in shard.columns]
        absent = [name for name in self.columns or () if name not in names]
        if absent:
            raise ConfigError(
                field="data",
                problem=f"{shard.file.url} has no column {absent[0]!r}.",
                remedy=f"The columns are {', '.join(names)}.",
            )
        for name, encoding, _ in shard.columns:
            if self.columns is None or name in self.columns:
                decoder_of(encoding, name, self.decoders)

    def _forget(self) -> None:
        """The state before first use, which is also what a pickle becomes."""
        self._lock = threading.RLock()
        self._shards: tuple[_Shard, ...] | None = None
        self._counts = np.zeros(0, dtype=np.int64)
        self._offsets: dict[int, npt.NDArray[np.int64]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("places", "columns", "decoders")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._forget()


def _shards_of(place: str) -> list[_Shard]:
    """What a directory's index says, each file compared with what is there."""
    (index,) = listing(f"{place.rstrip('/')}/index.json").files()
    there = {file.name: file for file in listing(place).files()}
    try:
        held = json.loads(read(index.url, 0, index.size))
        return [_shard(info, there) for info in held["shards"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            field="data",
            problem=f"{index.url} is no index of MDS: {error!r}.",
            remedy="Give the directory that MDSWriter wrote; index.json is its last file.",
        ) from error


def _shard(info: dict[str, Any], there: Mapping[str, SourceFile]) -> _Shard:
    raw = info["raw_data"]
    name, size = str(raw["basename"]), int(raw["bytes"])
    if (info["format"], info["version"]) != ("mds", 2):
        raise ConfigError(
            field="data",
            problem=f"shard {name} is of format {info['format']} {info['version']}, not mds 2.",
        )
    if name not in there and info.get("compression"):
        raise ConfigError(
            field="data",
            problem=f"shard {name} is compressed with {info['compression']}, so a sample of it can't be read "
            "alone.",
            remedy=f"Decompress {info['zip_data']['basename']} to {name} beside it, or write shards without "
            "compression.",
        )
    if name not in there or there[name].size != size:
        found = f"has {there[name].size} bytes" if name in there else "is not there"
        raise DataMismatch(
            field="data",
            problem=f"shard {name} {found}, its index says {size} bytes.",
            remedy="Restore it: some of the directory was not copied.",
        )
    columns = zip(info["column_names"], info["column_encodings"], info["column_sizes"], strict=True)
    return _Shard(file=there[name], samples=int(info["samples"]), columns=tuple(columns))


def _changed(shard: _Shard, problem: str) -> DataMismatch:
    return DataMismatch(
        field="data",
        problem=f"{shard.file.url} {problem}.",
        remedy="Restore the file; a run's data must not change while it trains.",
    )
