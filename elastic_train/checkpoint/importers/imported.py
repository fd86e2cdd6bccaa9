"""Result of an importer: a manifest of rows in foreign files and a document, both validated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from elastic_train.checkpoint.commit import check_aliases, tensors_of
from elastic_train.checkpoint.document import Json, StateFile
from elastic_train.checkpoint.dtypes import ELEMENTS
from elastic_train.checkpoint.fetch import Files
from elastic_train.checkpoint.importers.watched_store import plain
from elastic_train.checkpoint.manifest import Manifest, Row
from elastic_train.checkpoint.resharding import recorded
from elastic_train.errors import FormatUnsupported, FragmentMissing
from elastic_train.geometry.coverage import untiled
from elastic_train.storage.fsspec_store import Options
from elastic_train.storage.store import Store

LONGEST = 4096
"""Characters of the longest name."""
FLOOR, FACTOR = 64 << 20, 8
"""Bytes that the tensors of any checkpoint may have, and as many more for each byte of its files."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Imported:
    """The parts of an open checkpoint."""

    files: Files
    manifest: Manifest
    state: StateFile


def imported(
    store: Store,
    directory: str,
    rows: Iterable[Row],
    document: Mapping[str, Json],
    *,
    aliases: Mapping[str, str],
    options: Options | None = None,
) -> Imported:
    """Join the rows, if they tile every tensor; files are relative to `directory`, "" for the root."""
    files = Files(plain(store), directory, options=options)
    rows = list(rows)
    _check_names(rows, url=files.url)
    _check_size(rows, url=files.url)
    manifest = Manifest.of(sorted(rows, key=lambda r: (r.tensor, r.state)), url=files.url)
    problem = untiled(manifest.fragments)
    if problem is not None:
        raise FragmentMissing(
            url=files.url, problem=f"{problem}. A file is missing, or is not of this checkpoint."
        )
    check_aliases(manifest, aliases, url=files.url)
    reported = recorded(document, tensors_of(manifest), url=files.url)
    return Imported(files=files, manifest=manifest, state=StateFile(document=reported, aliases=aliases))


def _check_names(rows: Sequence[Row], *, url: str) -> None:
    for name in {name for row in rows for name in (row.tensor, row.state)}:
        if not name or "\0" in name or len(name) > LONGEST:
            raise FormatUnsupported(
                url=url, problem=f"{name[:80]!r} can't be the name of a tensor. Save it under another one."
            )


def _check_size(rows: Sequence[Row], *, url: str) -> None:
    """What the tensors are in memory is bounded by the bytes that they are made of: one stored element may
    stand for any number of them, and one storage for any number of tensors.
    """
    ends: dict[str, int] = {}
    total, largest = 0, (0, "")
    for row in rows:
        item = ELEMENTS[row.dtype].bytes
        size = row.box.numel * item
        span = size
        if row.byte_strides is not None and size:
            span = item + sum((n - 1) * s for n, s in zip(row.box.sizes, row.byte_strides, strict=True))
        ends[row.file] = max(ends.get(row.file, 0), row.byte_offset + span)
        total += size
        largest = max(largest, (size - span, row.tensor))
    stored = sum(ends.values())
    if total > FLOOR + FACTOR * stored:
        raise FormatUnsupported(
            url=url,
            problem=f"its tensors would take {total} bytes and are views of {stored}, {largest[1]} the "
            "largest of them. Save them with .contiguous().",
        )
