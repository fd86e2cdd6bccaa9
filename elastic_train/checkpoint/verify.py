"""Verify a checkpoint: everything that can be checked without the model; reports all problems."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from elastic_train.checkpoint.checksums import running_hash
from elastic_train.checkpoint.commit import check_aliases, check_coverage
from elastic_train.checkpoint.dtypes import ELEMENTS
from elastic_train.checkpoint.fetch import THREADS, verify_pages
from elastic_train.checkpoint.foreign_proof import damage_of_foreign_files
from elastic_train.checkpoint.manifest import Row
from elastic_train.checkpoint.ranges import strides_of
from elastic_train.checkpoint.reader import Checkpoint
from elastic_train.checkpoint.verify_ledger import VerifyLedger
from elastic_train.checkpoint.verify_rows import RANGE, Progress, RowBatch, RowColumns, reported
from elastic_train.errors import CheckpointDeleted, CheckpointError, ChecksumMismatch, StorageError
from elastic_train.geometry.fragments import Fragments
from elastic_train.storage.posix_store import PosixStore

MOST_REPORTED = 1000
"""Damaged fragments that are put in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a checkpoint holds and what is wrong with it; `unverified` rows have no checksums."""

    url: str
    tensors: int
    fragments: int
    bytes: int
    unverified: int
    problems: tuple[str, ...]

    @property
    def sound(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        head = f"{self.url}: {self.tensors} tensors in {self.fragments} fragments, {self.bytes} bytes"
        note = [f"{self.unverified} fragments have no checksums"] if self.unverified else []
        return "\n".join([head, *note, *(self.problems or ("no problems",))])


def verify(
    checkpoint: Checkpoint, *, ledger: Path | None = None, progress: Progress = lambda done, total: None
) -> Report:
    """Coverage, aliases, and every byte of every fragment against its page checksums and its content hash.

    A `ledger` is a local file that notes which rows were right; those that it notes aren't read again.

    CheckpointDeleted if the run deletes it meanwhile: that is no damage. ConfigError for a file that isn't a
    ledger of this checkpoint.
    """
    manifest = checkpoint.manifest
    rows = RowColumns(manifest)
    total = int(rows.size[rows.summed].sum())
    done, lock = 0, threading.Lock()

    notes = None if ledger is None else VerifyLedger(ledger, url=checkpoint.url, rows=rows)

    def look(numbered: tuple[int, RowBatch]) -> list[int]:
        nonlocal done
        number, batch = numbered
        bad: list[int] = []
        if notes is not None and number in notes.noted:
            checkpoint.files.count(batch.length)
        else:
            bad = _wrong(checkpoint, rows, batch)
            if notes is not None and not bad:
                notes.note(number)
        with lock:
            done += int(rows.size[batch.rows].sum())
            progress(done, total)
        return bad

    with (
        notes.open() if notes is not None else nullcontext(),
        ThreadPoolExecutor(_threads(checkpoint)) as pool,
    ):
        bad = [row for found in pool.map(look, enumerate(rows.batches())) for row in found]
    for same in rows.last():  # without checksums all that can be seen is that the bytes are there
        if _problem(checkpoint, manifest.row(int(same[0]))) is not None:
            bad += same.tolist()
    looked = (_problem(checkpoint, row) for row in manifest.rows(sorted(bad)[:MOST_REPORTED]))
    problems = [problem for problem in looked if problem is not None]
    return Report(
        url=checkpoint.url,
        tensors=len({tensor for tensor, _ in checkpoint.tensors}),
        fragments=len(manifest),
        bytes=int(rows.size.sum()),
        unverified=int((~rows.summed).sum()),
        problems=reported(
            (
                *_structure(checkpoint, rows.fragments),
                *problems,
                *damage_of_foreign_files(checkpoint.files, rows.foreign_files()),
            ),
            len(bad) - MOST_REPORTED,
        ),
    )


def _threads(checkpoint: Checkpoint) -> int:
    """Files of this machine come as fast as they are summed: more threads than cores wait in turn,
    with as much in the caches again.
    """
    store, _ = checkpoint.files.place
    cores = os.cpu_count() or THREADS
    return min(THREADS, cores + 1) if isinstance(store, PosixStore) else THREADS


def _wrong(checkpoint: Checkpoint, rows: RowColumns, batch: RowBatch) -> list[int]:
    """The rows of a batch that have to be looked at one by one, to say what is wrong with them."""

    def read(start: int, length: int) -> bytes:
        checkpoint.files.count(length)
        return store.read(path, start, length)

    try:
        store, path = checkpoint.files.at(rows.file(batch))
        if batch.length <= 2 * RANGE:
            return rows.wrong(batch, read(batch.start, batch.length))
        end = batch.start + batch.length  # one large fragment
        pieces = (read(at, min(RANGE, end - at)) for at in range(batch.start, end, RANGE))
        return batch.rows.tolist() if rows.one_is_wrong(batch, pieces) else []
    except CheckpointDeleted:
        raise
    except (CheckpointError, StorageError):
        return batch.rows.tolist()


def _structure(checkpoint: Checkpoint, fragments: Fragments) -> Iterator[str]:
    try:
        check_coverage(fragments, url=checkpoint.url)
    except CheckpointError as error:
        yield str(error)
    try:
        check_aliases(checkpoint.manifest, checkpoint.aliases, url=checkpoint.url)
    except CheckpointError as error:
        yield str(error)
    try:
        checkpoint.kinds()
    except CheckpointError as error:
        yield str(error)


def _problem(checkpoint: Checkpoint, row: Row) -> str | None:
    try:
        _check(checkpoint, row)
    except CheckpointDeleted:
        raise
    except (CheckpointError, StorageError) as error:
        return str(error)
    return None


def _check(checkpoint: Checkpoint, row: Row) -> None:
    item = ELEMENTS[row.dtype].bytes
    if not row.box.numel:
        return
    if row.checksums is None:
        last = sum((n - 1) * s for n, s in zip(row.box.sizes, strides_of(row, item), strict=True))
        checkpoint.files.read(row, row.byte_offset + last, item)
        return
    content = running_hash()
    size = row.box.numel * item
    for at in range(0, size, RANGE):
        data = checkpoint.files.read(row, row.byte_offset + at, min(RANGE, size - at))
        verify_pages(row, at, [memoryview(data)], url=checkpoint.url)
        content.update(data)
    if row.hash is not None and content.digest() != row.hash:
        raise ChecksumMismatch(
            url=checkpoint.url,
            problem=f"{row.tensor} ({row.state}) in {row.file} has right pages and a wrong content hash.",
        )
