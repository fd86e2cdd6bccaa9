"""Verify other systems' files by their own checks: CRCs in zips, sizes in safetensors headers.

Rows that point at such files have no checksums of ours. Before their bytes are copied and sealed with ours,
and when a checkpoint is verified, the files are read once and compared with their own.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from elastic_train.checkpoint.fetch import THREADS, Files
from elastic_train.checkpoint.importers.dcp import METADATA
from elastic_train.checkpoint.importers.dcp_metadata import decode
from elastic_train.checkpoint.importers.safetensors_header import read_header
from elastic_train.checkpoint.importers.windows import Item, windows
from elastic_train.checkpoint.importers.zip_index import read_index
from elastic_train.checkpoint.manifest import Manifest
from elastic_train.checkpoint.verify_rows import RowColumns
from elastic_train.errors import CheckpointError, ChecksumMismatch, StorageError
from elastic_train.storage.store import Store

BLOCK = 8 << 20
"""Bytes that are read and summed at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The sum that an entry of a zip should have."""

    store: Store
    path: str
    name: str
    start: int
    size: int
    crc: int
    count: Callable[[int], None]  # told how many bytes were read

    def check(self) -> str | None:
        found = 0
        for at in range(0, self.size, BLOCK):
            data = self.store.read(self.path, self.start + at, min(BLOCK, self.size - at))
            self.count(len(data))
            found = zlib.crc32(data, found)
        if found == self.crc:
            return None
        return (
            f"{self.store.url}/{self.path}: the {self.size} bytes of {self.name} aren't the ones written: "
            f"their sum is {found:08x} and should be {self.crc:08x}. Copy the file again."
        )


def damage_of_foreign_files(files: Files, foreign: Iterable[str]) -> Iterator[str]:
    """What is wrong with the files that rows without checksums point at, by what they say themselves."""
    claims: list[Claim] = []
    for file in foreign:
        try:
            claims += _claims(files, file)
        except (CheckpointError, StorageError) as error:
            yield str(error)
    with ThreadPoolExecutor(THREADS) as pool:
        yield from (problem for problem in pool.map(_checked, claims) if problem is not None)


def prove(files: Files, manifest: Manifest) -> None:
    """ChecksumMismatch if a file isn't what it says it is."""
    for problem in damage_of_foreign_files(files, RowColumns(manifest).foreign_files()):
        raise ChecksumMismatch(url=files.url, problem=problem)


def _checked(claim: Claim) -> str | None:
    try:
        return claim.check()
    except StorageError as error:
        return str(error)


def _claims(files: Files, file: str) -> list[Claim]:
    store, path = files.at(file)
    if path.endswith(".safetensors"):
        read_header(store, path)
        return []
    directory = path.rpartition("/")[0]
    metadata = f"{directory}/{METADATA}" if directory else METADATA
    if path.endswith(".distcp") and store.exists(metadata):
        found = decode(store.read(metadata), at=directory, url=f"{store.url}/{metadata}")
        items = {
            f"{key} {n}": b.item for key, grid in found.tensors.items() for n, b in enumerate(grid.blocks)
        }
        return _of_items(files, store, {key: item for key, item in items.items() if item.file == path})
    if not store.read(path, 0, min(4, store.size(path))).startswith(b"PK"):
        return []
    index = read_index(store, path)
    starts = index.starts(name for name, entry in index.entries.items() if entry.crc)
    return [
        Claim(
            store=store,
            path=path,
            name=entry,
            start=start,
            size=index.entries[entry].size,
            crc=index.entries[entry].crc,
            count=files.count,
        )
        for entry, start in starts.items()
    ]


def _of_items(files: Files, store: Store, items: dict[str, Item]) -> list[Claim]:
    """Each item is a zip of its own."""
    claims: list[Claim] = []
    for key, window in windows(store, items).items():
        index = read_index(window.as_store(), window.item.file)
        starts = index.starts(name for name, entry in index.entries.items() if entry.crc)
        claims += [
            Claim(
                store=store,
                path=window.item.file,
                name=key.rpartition(" ")[0],
                start=window.item.start + start,
                size=index.entries[entry].size,
                crc=index.entries[entry].crc,
                count=files.count,
            )
            for entry, start in starts.items()
        ]
    return claims
