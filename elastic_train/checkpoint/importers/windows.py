"""Items inside a file, each seen as a file of its own, with its first bytes read ahead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from elastic_train.checkpoint.importers.side_by_side import each
from elastic_train.errors import ChecksumMismatch, FragmentMissing, StorageNotFound
from elastic_train.storage.store import Store, exactly

HEAD = 1024
"""Bytes read of a large item; the index of a tensor that torch.save wrote is in them."""
WHOLE = 8192
"""Items up to this size are read as a whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    file: str  # path in the store
    start: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What a reader of one file asks of a store, answered by an item of a larger file."""

    store: Store
    item: Item
    head: bytes = field(repr=False)

    @property
    def url(self) -> str:
        return self.store.url

    def size(self, path: str) -> int:
        return self.item.length

    def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
        length = self.item.length - start if length is None else length
        if start + length > self.item.length:
            exactly(b"", path=path, start=start, length=length)
        if start + length <= len(self.head):
            return self.head[start : start + length]
        return self.store.read(path, self.item.start + start, length)

    def read_ranges(self, path: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        return [self.read(path, start, length) for start, length in ranges]

    def as_store(self) -> Store:
        """This window, for readers that take a store and only read from it."""
        return cast(Store, self)


def windows(store: Store, items: Mapping[str, Item]) -> dict[str, Window]:
    """A window for each item; FragmentMissing or ChecksumMismatch where a file can't hold its items."""
    files: dict[str, list[str]] = {}
    for name, item in items.items():
        files.setdefault(item.file, []).append(name)
    parts = each(store, lambda f: _of_file(store, f, {n: items[n] for n in files[f]}), list(files))
    return {name: window for part in parts for name, window in part.items()}


def _of_file(store: Store, file: str, items: Mapping[str, Item]) -> dict[str, Window]:
    url = f"{store.url}/{file}"
    try:
        size = store.size(file)
    except StorageNotFound as error:
        raise FragmentMissing(
            url=url, problem="the file is gone. Copy it again from where it was."
        ) from error
    for name, item in items.items():
        if item.start < 0 or item.length < 0 or item.start + item.length > size:
            problem = f"{name} ends at byte {item.start + item.length} of {size}: the file is truncated."
            raise ChecksumMismatch(url=url, problem=f"{problem} Copy it again.")
    distinct = sorted({(item.start, item.length) for item in items.values()})
    if sum(length for _, length in distinct) > size:
        raise ChecksumMismatch(url=url, problem="its items lie in one another: its metadata is damaged.")
    ranges = [(start, length if length <= WHOLE else HEAD) for start, length in distinct]
    heads = dict(zip(distinct, store.read_ranges(file, ranges), strict=True))
    return {
        name: Window(store=store, item=item, head=heads[item.start, item.length])
        for name, item in items.items()
    }
