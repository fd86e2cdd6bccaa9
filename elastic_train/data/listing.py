"""Files of a source: from paths, directories, patterns and URLs to a sorted list with sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import fsspec

from elastic_train.errors import ConfigError


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

    Directories are narrowed to names that end in `suffix`. Hidden files and directories are left out.
    """

    places: tuple[str, ...]
    suffix: str = ""

    def files(self) -> tuple[SourceFile, ...]:
        """Sorted by place, then by name. Raises ConfigError for a place with no files."""
        return tuple(file for place in self.places for file in _below(place, self.suffix))


def listing(places: str | Path | Sequence[str | Path] | Listing, *, suffix: str = "") -> Listing:
    """What a person may pass as the place of a source."""
    if isinstance(places, str | Path):
        return Paths((str(places),), suffix)
    if isinstance(places, Sequence):
        return Paths(tuple(map(str, places)), suffix)
    return places


def read(url: str, start: int, stop: int) -> bytes:
    """Bytes start .. stop-1 of a file, fewer where it is shorter."""
    filesystem, path = fsspec.url_to_fs(url)
    data = filesystem.cat_file(path, start=start, end=stop)
    # A web server that knows no ranges sends the whole file.
    return data[start:stop] if len(data) > stop - start else data


def _below(place: str, suffix: str) -> list[SourceFile]:
    filesystem, path = fsspec.url_to_fs(place)
    root = path.rstrip("/")
    if any(mark in path for mark in "*?["):
        root = path[: min(path.index(mark) for mark in "*?[" if mark in path)].rpartition("/")[0]
        found = filesystem.glob(path, detail=True)
    elif "http" not in filesystem.protocol and filesystem.isdir(path):
        found = {p: d for p, d in filesystem.find(path, detail=True).items() if p.endswith(suffix)}
    elif filesystem.exists(path):
        root, found = path.rpartition("/")[0], {path: filesystem.info(path)}
    else:
        found = {}
    files: list[SourceFile] = []
    details: dict[str, dict[str, Any]] = dict(found)
    for file, detail in sorted(details.items()):
        name = file[len(root) :].lstrip("/")
        if detail["type"] == "file" and not any(part.startswith(".") for part in name.split("/")):
            size = _size(filesystem, file, detail)
            files.append(SourceFile(name=name, url=filesystem.unstrip_protocol(file), size=size))
    if not files:
        raise ConfigError(
            field="data",
            problem=f"no files at {place}.",
            remedy="Check the path and that every node can read it.",
        )
    return files


def _size(filesystem: fsspec.AbstractFileSystem, path: str, detail: dict[str, Any]) -> int:
    """A web server may not tell a size; then the file is read once."""
    size = detail.get("size")
    return len(filesystem.cat_file(path)) if size is None else int(size)
