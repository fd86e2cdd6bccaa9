"""Perform reads: fetch ranges in parallel, verify each page, copy the elements into the target arrays."""

from __future__ import annotations

import posixpath
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from elastic_train.checkpoint.checksums import crc, page_bytes
from elastic_train.checkpoint.dtypes import ELEMENTS
from elastic_train.checkpoint.lazy_arrays import Array
from elastic_train.checkpoint.manifest import Row
from elastic_train.checkpoint.piece import span
from elastic_train.checkpoint.ranges import FragmentRange, Read, Request, extent, strides_of
from elastic_train.checkpoint.validate.files import AllowedPlaces
from elastic_train.checkpoint.zero_copy_read import targets
from elastic_train.errors import (
    CheckpointDeleted,
    ChecksumMismatch,
    FragmentMissing,
    StorageError,
    StorageNotFound,
)
from elastic_train.geometry.box import Box
from elastic_train.geometry.layout import flat_range_boxes
from elastic_train.storage.fsspec_store import Options, open_store
from elastic_train.storage.store import Store

THREADS = 8
T = TypeVar("T")


class Files:
    """The files that a manifest in `directory` of `store` names, those elsewhere included. Counts bytes
    read.

    `kept` says whether the run still keeps the checkpoint: what its run deleted is not damaged. `siblings` is
    the directory of the run's checkpoints, for one that was opened as a run's.
    """

    def __init__(
        self,
        store: Store,
        directory: str,
        *,
        options: Options | None = None,
        kept: Callable[[], bool] = lambda: True,
        siblings: str | None = None,
    ) -> None:
        self._kept = kept
        self.places = AllowedPlaces(store.url, directory, siblings=siblings)
        self._store, self._directory, self._options = store, directory, options
        self._foreign: dict[str, Store] = {}
        self._sizes: dict[str, dict[str, int]] = {}
        self.url = f"{store.url}/{directory}" if directory else store.url.rstrip("/")
        self.bytes_read = 0
        self._count = threading.Lock()

    @property
    def place(self) -> tuple[Store, str]:
        """The store, and the directory in it."""
        return self._store, self._directory

    def at(self, file: str) -> tuple[Store, str]:
        """The store that holds a file, and its path there; OutsideOfCheckpoint where none may be read."""
        self.places.check(file)
        if "://" not in file and not file.startswith("/"):
            return self._store, posixpath.normpath(posixpath.join(self._directory, file))
        parent, _, name = file.rpartition("/")
        if parent not in self._foreign:
            self._foreign[parent] = open_store(parent or "/", options=self._options)
        return self._foreign[parent], name

    def absolute(self, file: str) -> str:
        """The file as a manifest elsewhere names it."""
        if "://" in file or file.startswith("/"):
            return file
        store, path = self.at(file)
        return f"{store.url}/{path}" if "://" in store.url else posixpath.abspath(f"{store.url}/{path}")

    def load(self, name: str) -> bytes:
        """All of a file in the checkpoint's own directory; FragmentMissing if it isn't there."""
        try:
            return self._store.read(f"{self._directory}/{name}")
        except StorageNotFound as error:
            raise self._missing(f"{name} is gone") from error

    def read(self, row: Row, start: int, length: int) -> bytes:
        """Bytes of the file that a row names; FragmentMissing if they aren't there."""
        return self._read(row, start, length, lambda store, path: store.read(path, start, length))

    def read_into(self, row: Row, start: int, buffers: Sequence[memoryview]) -> None:
        """The same into memory that is there."""
        length = sum(map(len, buffers))
        self._read(row, start, length, lambda store, path: store.read_into(path, start, buffers))

    def _read(self, row: Row, start: int, length: int, work: Callable[[Store, str], T]) -> T:
        store, path = self.at(row.file)
        try:
            found = work(store, path)
        except StorageError as error:
            if (what := _lacks(store, path, start + length)) is not None:
                raise self._missing(f"{row.file} {what}; it holds {_held(row)}") from error
            raise
        self.count(length)
        return found

    def count(self, length: int) -> None:
        """Bytes of these files that were read, here or by others."""
        with self._count:
            self.bytes_read += length

    def check_room(self, rows: Sequence[Row]) -> None:
        """FragmentMissing where large fragments lie behind the ends of their files: before memory is taken
        for them.
        """
        for row in rows:
            store, path = self.at(row.file)
            if path not in self._sizes.setdefault(store.url, {}):
                try:
                    self._sizes[store.url][path] = store.size(path)
                except StorageNotFound as error:
                    raise self._missing(f"{row.file} is gone; it holds {_held(row)}") from error
            size, end = self._sizes[store.url][path], row.byte_offset + extent(row)
            if size < end:
                what = f"{row.file} ends at byte {size}, too early"
                raise self._missing(f"{what}; it holds {_held(row)}")

    def _missing(self, what: str) -> CheckpointDeleted | FragmentMissing:
        """Why bytes are absent: the log says that a checkpoint goes before the first of its files does."""
        if not self._kept():
            return CheckpointDeleted(url=self.url, problem=f"its run deleted it ({what}). Open a newer one.")
        return FragmentMissing(url=self.url, problem=f"{what}. Use an older checkpoint.")


def _lacks(store: Store, path: str, end: int) -> str | None:
    """Why a file can't have bytes up to `end`, if that is so."""
    try:
        size = store.size(path)
    except StorageNotFound:
        return "is gone"
    return f"ends at byte {size}, too early" if size < end else None


def _held(row: Row) -> str:
    return f"{row.tensor} ({row.state}) {span(row.box)}"


def fetch(files: Files, reads: Sequence[Read], requests: Sequence[Request], outputs: Sequence[Array]) -> None:
    """Fill `outputs`, one array per request with the sizes of its box."""

    def perform(read: Read) -> None:
        straight = targets(read, requests, outputs)
        if straight is not None:
            files.read_into(read.segments[0].row, read.start, [b for part in straight for b in part])
            for segment, part in zip(read.segments, straight[::2], strict=True):
                if segment.row.checksums is not None:
                    verify_pages(segment.row, segment.at, part, url=files.url)
            return
        data = files.read(read.segments[0].row, read.start, read.length)
        for segment in read.segments:
            view = memoryview(data)[segment.start - read.start :][: segment.length]
            if segment.row.checksums is not None:
                verify_pages(segment.row, segment.at, [view], url=files.url)
            _scatter(segment, view, requests, outputs)

    if len(reads) <= 1:
        for read in reads:
            perform(read)
        return
    with ThreadPoolExecutor(min(THREADS, len(reads))) as pool:
        for _ in pool.map(perform, reads):
            pass


def verify_pages(row: Row, at: int, views: Sequence[memoryview], *, url: str) -> None:
    """ChecksumMismatch if a page of a fragment is damaged, of which `views` hold the bytes from `at` on, one
    after the other.
    """
    assert row.checksums is not None
    item = ELEMENTS[row.dtype].bytes
    step = page_bytes(row.box.numel * item)
    length = sum(map(len, views))
    for start in range(0, length, step):
        stop = min(start + step, length)
        number = (at + start) // step
        if crc(*_between(views, start, stop)) != row.checksums[number]:
            first, low = (at + start) // item, row.byte_offset + at + start
            raise ChecksumMismatch(
                url=url,
                problem=f"bytes {low} to {low + stop - start} of {row.file} aren't the ones written: page "
                f"{number} of {row.tensor} ({row.state}) {span(row.box)}, elements {first} to "
                f"{first + (stop - start) // item} of that fragment. Use an older checkpoint.",
            )


def _between(views: Sequence[memoryview], start: int, stop: int) -> Iterator[memoryview]:
    """The bytes start .. stop of views that follow one another."""
    at = 0
    for view in views:
        if at < stop and start < at + len(view):
            yield view[max(0, start - at) : stop - at]
        at += len(view)


def _scatter(
    segment: FragmentRange, view: memoryview, requests: Sequence[Request], outputs: Sequence[Array]
) -> None:
    """Copy a segment's elements to every request that wants some of them."""
    row, kind = segment.row, ELEMENTS[segment.row.dtype]
    if row.checksums is None:
        ((index, part),) = segment.wanted
        strides = strides_of(row, kind.bytes)
        source: Array = np.ndarray(part.sizes, dtype=kind.numpy, buffer=view, strides=strides)
        outputs[index][_place(row, part, requests[index][2]).slices] = source
        return
    flat: Array = np.frombuffer(view, dtype=np.uint8).view(kind.numpy)
    first, at = segment.at // kind.bytes, 0
    for block in flat_range_boxes(row.box.sizes, first, first + len(flat)):
        source = flat[at : at + block.numel].reshape(block.sizes)
        at += block.numel
        for index, part in segment.wanted:
            if (both := block.intersect(part)) is not None:
                place = _place(row, both, requests[index][2])
                outputs[index][place.slices] = source[both.within(block).slices]


def _place(row: Row, part: Box, wanted: Box) -> Box:
    """A part of a fragment, in the coordinates of the array that was asked for."""
    whole = Box(tuple(a + b for a, b in zip(part.offsets, row.box.offsets, strict=True)), part.sizes)
    return whole.within(wanted)
