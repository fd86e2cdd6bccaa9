"""Verifying a checkpoint: everything that can be checked without the model, and all problems instead of the
first.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from elastic_train.checkpoint.checksums import running_hash
from elastic_train.checkpoint.commit import check_aliases, check_coverage
from elastic_train.checkpoint.dtypes import ELEMENTS
from elastic_train.checkpoint.fetch import THREADS, verify_pages
from elastic_train.checkpoint.foreign_proof import damage_of_foreign_files
from elastic_train.checkpoint.manifest import Row
from elastic_train.checkpoint.ranges import MOST, strides_of
from elastic_train.checkpoint.reader import Checkpoint
from elastic_train.errors import CheckpointDeleted, CheckpointError, ChecksumMismatch, StorageError


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


def verify(checkpoint: Checkpoint) -> Report:
    """Coverage, aliases, and every byte of every fragment against its page checksums and its content hash.

    CheckpointDeleted if the run deletes it meanwhile: that is no damage.
    """
    manifest = checkpoint.manifest
    with ThreadPoolExecutor(THREADS) as pool:
        found = pool.map(lambda i: _problem(checkpoint, manifest.row(i)), range(len(manifest)))
        damaged = [p for p in found if p is not None]
    return Report(
        url=checkpoint.url,
        tensors=len({tensor for tensor, _ in checkpoint.tensors}),
        fragments=len(manifest),
        bytes=int(manifest.fragments.nbytes.sum()),
        unverified=manifest.table.column("checksums").null_count,
        problems=(
            *_structure(checkpoint),
            *damaged,
            *damage_of_foreign_files(checkpoint.files, manifest),
        ),
    )


def _structure(checkpoint: Checkpoint) -> Iterator[str]:
    try:
        check_coverage(checkpoint.manifest, url=checkpoint.url)
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
    for at in range(0, size, MOST):
        data = checkpoint.files.read(row, row.byte_offset + at, min(MOST, size - at))
        verify_pages(row, at, [memoryview(data)], url=checkpoint.url)
        content.update(data)
    if row.hash is not None and content.digest() != row.hash:
        raise ChecksumMismatch(
            url=checkpoint.url,
            problem=f"{row.tensor} ({row.state}) in {row.file} has right pages and a wrong content hash.",
        )
