"""WebDataset's shards by number: where each sample lies in its tar file is found once and kept.

A sample is the run of files whose names agree up to the first dot of the last part, as the WebDataset library
groups them (github.com/webdataset/webdataset, "The WebDataset Format"); its files are entries by extension.
"""

from __future__ import annotations

import io
import json
import re
import tarfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from elastic_train.data.index_cache import replace_whole
from elastic_train.data.listing import Listing, SourceFile, listing, opened, read, refuse_compressed
from elastic_train.errors import ConfigError, DataMismatch

_NAME = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)")
_LEFT_OUT = re.compile(r"__[^/]*__($|/)")  # what the library keeps for itself


class TarSamples:
    """Sample i over all shards, as {"__key__": its name, "__url__": its shard, extension: bytes}.

    `decode` makes of it what is trained; the library's own decoders take it as it is. `index` is a path that
    keeps where samples begin: without it every process reads the headers of all shards once. Order and
    contents are those of `WebDataset(shards, shardshuffle=False)` in one process. Shards are plain tar files.
    """

    def __init__(
        self,
        places: str | Path | Sequence[str | Path] | Listing,
        *,
        decode: Callable[[dict[str, Any]], Any] | None = None,
        index: str | Path | None = None,
    ):
        self.decode, self.index = decode, index
        self.draws_nothing = decode is None
        self._listing = listing(places, suffix=".tar")
        self._forget()

    def __len__(self) -> int:
        self._open()
        return int(self._counts[-1]) if len(self._counts) else 0

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        number = int(np.searchsorted(self._counts, index, side="right"))
        at = index - (int(self._counts[number - 1]) if number else 0)
        file, bounds = self._open()[number], self._bounds[number]
        start, stop = int(bounds[at]), int(bounds[at + 1])
        data = read(file.url, start, stop)
        samples = _samples(io.BytesIO(data), file)
        if len(data) != stop - start or len(samples) != 1:
            raise DataMismatch(
                field="data",
                problem=f"{file.url} has no sample at bytes {start} to {stop}, where one was found before.",
                remedy="Restore the shard, or remove the index and start a new run under another name.",
            )
        ((_, sample),) = samples
        return sample if self.decode is None else self.decode(sample)

    def describe(self) -> Any:
        """Names and sizes of the shards, for the identity of the data."""
        return tuple((file.name, file.size) for file in self._open())

    def _open(self) -> tuple[SourceFile, ...]:
        with self._lock:
            if self._files is not None:
                return self._files
            files = self._listing.files()
            refuse_compressed(files)
            self._bounds = _kept(self.index, files)
            self._counts = np.cumsum([len(bounds) - 1 for bounds in self._bounds], dtype=np.int64)
            self._files = files
            return files

    def _forget(self) -> None:
        """The state before first use, which is also what a pickle becomes."""
        self._lock = threading.RLock()
        self._files: tuple[SourceFile, ...] | None = None
        self._bounds: list[npt.NDArray[np.int64]] = []  # of each shard: first bytes of samples, then its end
        self._counts = np.zeros(0, dtype=np.int64)

    def __getstate__(self) -> dict[str, Any]:
        names = ("decode", "index", "draws_nothing", "_listing")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._forget()


def _kept(index: str | Path | None, files: tuple[SourceFile, ...]) -> list[npt.NDArray[np.int64]]:
    """Where samples begin, from the index where it is there, else from the shards; then it is written."""
    path = None if index is None else Path(index).expanduser()
    listed = [[file.name, file.size] for file in files]
    if path is not None and path.is_file():
        held = json.loads(path.read_text())
        if held["shards"] != listed:
            raise DataMismatch(
                field="data",
                problem=f"the index {path} is of other shards than the {len(files)} that are there.",
                remedy="Remove it, and a new one is made.",
            )
        return [np.array(bounds, dtype=np.int64) for bounds in held["bounds"]]
    found = [_bounds(file) for file in files]
    if path is not None:
        held = {"shards": listed, "bounds": [bounds.tolist() for bounds in found]}
        replace_whole(path, json.dumps(held))
    return found


def _bounds(file: SourceFile) -> npt.NDArray[np.int64]:
    with opened(file.url) as handle:
        starts = [start for start, _ in _samples(handle, file, contents=False)]
    return np.array([*starts, file.size], dtype=np.int64)


def _samples(
    handle: IO[bytes], file: SourceFile, *, contents: bool = True
) -> list[tuple[int, dict[str, Any]]]:
    """The first byte and the entries of each sample; entries are None without `contents`."""
    found: list[tuple[int, dict[str, Any]]] = []
    try:
        with tarfile.open(fileobj=handle, mode="r:") as tar:
            while (member := tar.next()) is not None:
                tar.members = []  # type: ignore[assignment] - or the archive keeps all of them
                name = _NAME.fullmatch(member.name)
                if not member.isreg() or name is None or _LEFT_OUT.match(member.name):
                    continue
                key, extension = name.group(1), name.group(2).lower()
                if not found or found[-1][1]["__key__"] != key:
                    url = file.url.removeprefix("file://")
                    found.append((member.offset, {"__key__": key, "__url__": url}))
                if extension in found[-1][1]:
                    raise _damaged(file, f"sample {key!r} has two files {extension!r}")
                part = tar.extractfile(member) if contents else None
                found[-1][1][extension] = None if part is None else part.read()
    except tarfile.TarError as error:
        raise _damaged(file, str(error)) from error
    return found


def _damaged(file: SourceFile, problem: str) -> ConfigError:
    return ConfigError(
        field="data",
        problem=f"{file.url} is no shard of WebDataset's: {problem}.",
        remedy="Write it again; its samples are plain tar members, each name once.",
    )
