"""Files of a source: from paths, directories, patterns and URLs to a sorted list with sizes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import fsspec

from elastic_train.data.local_files import existing, local_files
from elastic_train.errors import ConfigError

COMPRESSED = (".gz", ".zst", ".bz2", ".xz", ".lz4")
_LOCAL = "file://"
_URL = re.compile(r"[A-Za-z][\w.+-]*(://|::)")
_BRACES = re.compile(r"\{(?:(\d+)\.\.(\d+)|([^{}]*,[^{}]*))\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """One file: its name below the place that was asked for, where it is, and its bytes."""

    name: str
    url: str
    size: int


class Listing(Protocol):
    """Says which files a source reads; the same list in every process that sees the same files."""

    def files(self) -> tuple[SourceFile, ...]: ...


@dataclass(frozen=True, slots=True)
class Paths:
    """Files below paths or URLs: a file, a directory with everything below it, or a pattern with `*`.

    What is there under the very name is meant, whatever characters are in it; else `{000..099}` and `{a,b}`
    stand for several places. Directories are narrowed to names that end in `suffix`, and refused where such
    files are compressed; links count as what they lead to. Hidden files and directories are left out.
    """

    places: tuple[str, ...]
    suffix: str = ""

    def files(self) -> tuple[SourceFile, ...]:
        """Sorted by place, then by name. Raises ConfigError for a place with no files."""
        places = (each for place in self.places for each in spelled_out(place))
        return tuple(file for place in places for file in _below(place, self.suffix))


def listing(places: str | Path | Sequence[str | Path] | Listing, *, suffix: str = "") -> Listing:
    """What a person may pass as the place of a source."""
    if isinstance(places, str | Path):
        return Paths((str(places),), suffix)
    if isinstance(places, Sequence):
        return Paths(tuple(map(str, places)), suffix)
    return places


def spelled_out(place: str) -> list[str]:
    """The places that braces stand for, as in a shell; the place itself where it is there or has none."""
    found = None if existing(place) is not None else _BRACES.search(place)
    if found is None:
        return [place]
    first, last, names = found.groups()
    if names is None:
        step = 1 if int(first) <= int(last) else -1
        numbers = range(int(first), int(last) + step, step)
        width = max(len(first), len(last)) if first.startswith("0") or last.startswith("0") else 0
        parts = [f"{number:0{width}}" for number in numbers]
    else:
        parts = names.split(",")
    head, tail = place[: found.start()], place[found.end() :]
    return [each for part in parts for each in spelled_out(f"{head}{part}{tail}")]


def refuse_compressed(files: Iterable[SourceFile]) -> None:
    """ConfigError for a file whose name says that its bytes are not those of the samples."""
    for file in files:
        if file.name.endswith(COMPRESSED):
            raise ConfigError(
                field="data",
                problem=f"{file.url} is compressed, so nothing in it can be read by number.",
                remedy="Decompress it once, or number what a function opens: data.stream.Stream.",
            )


def opened(url: str) -> AbstractContextManager[IO[bytes]]:
    """A file of a listing, for reading. Its name is a name, whatever characters are in it."""
    if url.startswith(_LOCAL):
        return Path(url.removeprefix(_LOCAL)).open("rb")
    filesystem, path = fsspec.url_to_fs(url)
    return filesystem.open(path, "rb")


def read(url: str, start: int, stop: int) -> bytes:
    """Bytes start .. stop-1 of a file, fewer where it is shorter."""
    if url.startswith(_LOCAL):
        with opened(url) as file:
            file.seek(start)
            return file.read(stop - start)
    filesystem, path = fsspec.url_to_fs(url)
    data = filesystem.cat_file(path, start=start, end=stop)
    # A web server that knows no ranges sends the whole file.
    return data[start:stop] if len(data) > stop - start else data


def _below(place: str, suffix: str) -> list[SourceFile]:
    suffixes = (suffix, *(f"{suffix}{end}" for end in COMPRESSED)) if suffix else ("",)
    if existing(place) is not None or not _URL.match(place):
        root, sizes = local_files(place, suffixes)
        found = {path: (f"{_LOCAL}{path}", size) for path, size in sizes.items()}
    elif place.startswith(_LOCAL):
        return _below(place.removeprefix(_LOCAL), suffix)
    else:
        root, found = _remote(place, suffixes)
    files: list[SourceFile] = []
    for path, (url, size) in sorted(found.items()):
        name = path[len(root) :].lstrip("/")
        if not any(part.startswith(".") for part in name.split("/")):
            files.append(SourceFile(name=name, url=url, size=size))
    if not files:
        raise ConfigError(
            field="data",
            problem=f"no files at {_looked_at(place)}.",
            remedy="Check the path and that every node can read it; an absolute one is the same on all.",
        )
    if suffix:
        refuse_compressed(files)
    return files


def _looked_at(place: str) -> str:
    """A place, and what a relative path was taken from: each process has a working directory of its own."""
    if _URL.match(place) or Path(place).expanduser().is_absolute():
        return place
    return f"{place}, seen from the working directory {Path.cwd()} of this process"


def _remote(place: str, suffixes: tuple[str, ...]) -> tuple[str, dict[str, tuple[str, int]]]:
    """As `local_files`, with the URL of each file too."""
    filesystem, path = fsspec.url_to_fs(place)
    root = path.rstrip("/")
    is_web, there = "http" in filesystem.protocol, filesystem.exists(path)
    if there and not is_web and filesystem.isdir(path):
        found = {p: d for p, d in filesystem.find(path, detail=True).items() if p.endswith(suffixes)}
    elif there:
        root, found = path.rpartition("/")[0], {path: filesystem.info(path)}
    elif any(mark in path for mark in "*?["):
        root = path[: min(path.index(mark) for mark in "*?[" if mark in path)].rpartition("/")[0]
        found = filesystem.glob(path, detail=True)
    else:
        found = {}
    details: dict[str, dict[str, Any]] = dict(found)
    files = {file: detail for file, detail in details.items() if detail["type"] == "file"}
    return root, {
        file: (filesystem.unstrip_protocol(file), _size(filesystem, file, detail))
        for file, detail in files.items()
    }


def _size(filesystem: fsspec.AbstractFileSystem, path: str, detail: dict[str, Any]) -> int:
    """A web server may not tell a size; then the file is read once."""
    size = detail.get("size")
    return len(filesystem.cat_file(path)) if size is None else int(size)
