"""A store of this machine that remembers what was asked of it, and what that was like before it was read."""

from __future__ import annotations

import stat
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from elastic_train.checkpoint.checksums import digest
from elastic_train.checkpoint.document import Json, encode
from elastic_train.errors import StorageError
from elastic_train.storage.posix_store import PosixStore
from elastic_train.storage.store import Blocks, Names, Store

Look = tuple[str, str, str]
"""`file`, `names` or `list`; the store's root; the path in it."""


class WatchedStore(PosixStore):
    """What is read through it goes into `seen`: how a file or a listing was when it was first asked for."""

    def __init__(self, store: PosixStore, seen: dict[Look, Json]) -> None:
        super().__init__(store.root, retry=store.retry)
        self.plain: Store = store
        self._seen = seen
        self._lock = threading.Lock()

    def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
        self._look("file", path)
        return super().read(path, start, length)

    def read_ranges(self, path: str, ranges: Sequence[tuple[int, int | None]]) -> Blocks:
        self._look("file", path)
        return super().read_ranges(path, ranges)

    def size(self, path: str) -> int:
        self._look("file", path)
        return super().size(path)

    def exists(self, path: str) -> bool:
        self._look("file", path)
        return super().exists(path)

    def names(self, prefix: str = "") -> Names:
        self._look("names", prefix)
        return super().names(prefix)

    def list(self, prefix: str = "") -> Names:
        self._look("list", prefix)
        return super().list(prefix)

    def _look(self, kind: str, path: str) -> None:
        look = (kind, str(self.root), path)
        if look not in self._seen:
            found = looked(look)
            with self._lock:
                self._seen.setdefault(look, found)


def looked(look: Look) -> Json:
    """How a file or a listing is now: equal if, and only if, nothing of it was changed.

    A file is known by device, number, size, and the times of its last change and of its inode's; those are
    the kernel's, and no program that writes sets the second back.
    """
    kind, root, path = look
    if kind == "file":
        try:
            found = Path(root, path).stat()
        except (OSError, ValueError):
            return None
        if not stat.S_ISREG(found.st_mode):
            return None
        return [found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]
    store = PosixStore(Path(root))
    listing: Mapping[str, Callable[[str], Names]] = {"names": store.names, "list": store.list}
    try:
        return digest(encode(listing[kind](path)))
    except StorageError:
        return None


def newest(seen: Mapping[Look, Json]) -> int:
    """When the newest of the files was changed, in nanoseconds."""
    return max((max(found[3], found[4]) for found in seen.values() if isinstance(found, list)), default=0)


def plain(store: Store) -> Store:
    """The store itself, where it is a watched one."""
    return store.plain if isinstance(store, WatchedStore) else store
