"""Keep the index of another system's checkpoint, so that it is built once.

It is kept in a cache directory of the user's and never beside the source, which is another system's and often
can't be written. Nothing is kept of a source that isn't in this machine's file systems.

An index is used if every file and listing that its building looked at is as it was then, and it is checked
like any other manifest; whatever is wrong with it, it is built anew. What changed while it was built, or
shortly before, isn't kept: the clock of a file system has coarse ticks.
"""

from __future__ import annotations

import functools
import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pyarrow as pa

from elastic_train.checkpoint.checksums import digest
from elastic_train.checkpoint.commit import check_aliases
from elastic_train.checkpoint.document import Json, StateFile, decode, encode
from elastic_train.checkpoint.fetch import Files
from elastic_train.checkpoint.importers.imported import Imported
from elastic_train.checkpoint.importers.openable import local_path
from elastic_train.checkpoint.importers.watched_store import Look, WatchedStore, looked, newest
from elastic_train.checkpoint.manifest import SCHEMA, Manifest
from elastic_train.errors import ElasticTrainError
from elastic_train.storage.fsspec_store import is_local
from elastic_train.storage.posix_store import PosixStore
from elastic_train.storage.store import Store

FORMAT = b"elastic_train.index/1\n"
LARGEST, MOST = 64 << 20, 256 << 20
"""Bytes of one index, and of all of them: those that weren't used for longest go."""
LEFT_S = 3600
"""Seconds after which what somebody began to write is nobody's."""
TICK_NS = 2_000_000_000
"""A file that changed within it may change again without another time."""


_places: list[Path | None] = [Path("~/.cache/elastic_train/indexes")]


def keep_indexes_in(directory: Path | None) -> Path | None:
    """Keep them in this process there, or with None nowhere; where that was before. Others who may write
    there would be believed, so a directory that isn't the user's own alone isn't used.
    """
    before, _places[0] = _places[0], directory
    return before


class IndexCache:
    """The index of one source, for one opening of it; `store` makes the stores that its importer reads."""

    def __init__(self, url: str, names: Sequence[str] | None) -> None:
        self._seen: dict[Look, Json] = {}
        self._file: Path | None = None
        if is_local(url) and _places[0] is not None:
            with suppress(ElasticTrainError, RuntimeError):  # a name that isn't text; no home
                place = str(PosixStore(local_path(url)).root)
                said = [place, None if names is None else list(names), _release()]
                self._file = _places[0].expanduser().absolute() / digest(encode(said))

    def store(self, store: Store) -> Store:
        """The same store, watched if its index may be kept."""
        if self._file is None or not isinstance(store, PosixStore):
            return store
        return WatchedStore(store, self._seen)

    def open(self) -> Imported | None:
        """The kept index, if the source is still what it was made from."""
        if self._file is None:
            return None
        try:
            if self._file.stat().st_size > LARGEST:
                return None
            data = memoryview(self._file.read_bytes())
            found = _decoded(data)
            os.utime(self._file)
        except OSError:
            return None
        except (ElasticTrainError, LookupError, TypeError, ValueError, ArithmeticError):
            with suppress(OSError):
                self._file.unlink()
            return None
        return found

    def keep(self, found: Imported) -> None:
        """Write the index, unless the source changed meanwhile; where that can't be done, nothing is kept."""
        if self._file is None or any(looked(look) != was for look, was in self._seen.items()):
            return
        partial = self._file.with_name(f".{self._file.name}.{secrets.token_hex(4)}")
        try:
            data = _encoded(self._seen, found)
            if len(data) > LARGEST:
                return
            self._file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not _is_ours(self._file.parent):
                return
            partial.write_bytes(data)
            if newest(self._seen) <= partial.stat().st_mtime_ns - TICK_NS:
                partial.replace(self._file)
                _trim(self._file.parent)
        except (OSError, ElasticTrainError):
            return
        finally:
            with suppress(OSError):
                partial.unlink(missing_ok=True)


def _encoded(seen: dict[Look, Json], found: Imported) -> bytes:
    store, directory = found.files.place
    said = {
        "seen": [[*look, was] for look, was in sorted(seen.items())],
        "root": store.url,
        "directory": directory,
    }
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, SCHEMA) as writer:
        writer.write_table(found.manifest.table)
    parts = [encode(said), sink.getvalue().to_pybytes(), found.state.encode()]
    body = b"".join([len(part).to_bytes(8, "little") + part for part in parts])
    return FORMAT + digest(body).encode() + body


def _decoded(data: memoryview) -> Imported | None:
    """What `_encoded` was given, None where the source isn't what it was; errors for anything else."""
    at = len(FORMAT) + 32
    if data[: len(FORMAT)] != FORMAT or digest(bytes(data[at:])).encode() != data[len(FORMAT) : at]:
        raise ValueError("it isn't what was written")
    parts: list[bytes] = []
    while at < len(data):
        size = int.from_bytes(data[at : at + 8], "little")
        parts.append(bytes(data[at + 8 : at + 8 + size]))
        at += 8 + size
    said, table, state = decode(parts[0], url="index"), parts[1], parts[2]
    for kind, root, path, was in said["seen"]:
        if looked((kind, root, path)) != was:
            return None
    files = Files(PosixStore(Path(said["root"])), said["directory"])
    with pa.ipc.open_stream(table) as reader:
        rows = reader.read_all()
    if rows.schema != SCHEMA:
        raise ValueError("its columns are others")
    rows.validate(full=True)
    manifest = Manifest.from_table(rows, url=files.url)
    manifest.check_tiling(url=files.url)
    for file in manifest.distinct("file"):
        files.places.check(file)
    stated = StateFile.decode(state, url=files.url)
    check_aliases(manifest, stated.aliases, url=files.url)
    return Imported(files=files, manifest=manifest, state=stated)


def _is_ours(directory: Path) -> bool:
    """Whether nobody else may write there."""
    found = directory.stat()
    return found.st_uid == os.geteuid() and not found.st_mode & 0o022


def _trim(directory: Path) -> None:
    """Remove what wasn't used for longest, and what writers left that were killed."""
    files = sorted(((path.stat(), path) for path in directory.iterdir()), key=lambda item: -item[0].st_mtime)
    total = 0
    for found, path in files:
        total += found.st_size
        left = path.name.startswith(".") and found.st_mtime < files[0][0].st_mtime - LEFT_S
        if total > MOST or left:
            with suppress(OSError):
                path.unlink()


@functools.cache
def _release() -> str:
    """This release, and its files' times where somebody is at work on them."""
    times = [entry.stat().st_mtime_ns for entry in os.scandir(Path(__file__).parent) if entry.is_file()]
    with suppress(PackageNotFoundError):
        return f"{version('elastic_train')} {max(times)}"
    return f"{max(times)}"


def cached(
    url: str, names: Sequence[str] | None, build: Callable[[IndexCache], Imported | None]
) -> Imported | None:
    """The kept index of a source, or the one that is built now and kept."""
    cache = IndexCache(url, names)
    found = cache.open()
    if found is None and (found := build(cache)) is not None:
        cache.keep(found)
    return found
