"""Refer to unchanged fragments of an older checkpoint of the run instead of writing them again.

Only tensors that aren't trained are looked at (frozen layers, the base of an adapter): they go into files of
their own, so that a reference keeps nothing else from being deleted. A row always names the file that holds
the bytes, never another reference. Every `full_every`th checkpoint is written whole, which bounds how many a
lost file damages.
"""

from __future__ import annotations

import posixpath
from collections.abc import Collection, Iterable
from dataclasses import replace

import pyarrow as pa
import pyarrow.compute as pc

from elastic_train.checkpoint.checksums import digest
from elastic_train.checkpoint.manifest import Manifest, Row
from elastic_train.checkpoint.run_directory import RunDirectory
from elastic_train.checkpoint.unchanged import Key, Unchanged

FULL_EVERY = 16


class References:
    """What the newest committed checkpoint of a run offers. Read again only when there is a newer one."""

    def __init__(self, run: RunDirectory, *, full_every: int = FULL_EVERY) -> None:
        self._run, self._full_every = run, full_every
        self._asked = 0
        self._slot = -1
        self._rows: dict[Key, Row] = {}

    def unchanged(self, stable: Iterable[str]) -> Unchanged:
        """For one save. Without stable tensors nothing is read."""
        stable = frozenset(stable)
        if not stable:
            return Unchanged()
        self._asked += 1
        if self._asked % self._full_every == 0:
            return Unchanged(stable=stable)
        kept = self._run.records()
        if kept and kept[-1].slot != self._slot:
            url = f"{self._run.store.url}/{kept[-1].path}"
            data = self._run.store.read(f"{kept[-1].path}/manifest.parquet")
            # What was damaged since is not repeated: then everything is written.
            sound = digest(data) == kept[-1].manifest_hash
            manifest = Manifest.decode(data, url=url) if sound else Manifest.of([])
            self._rows = rows_to_repeat(manifest, kept[-1].path, stable)
            self._slot = kept[-1].slot
        return Unchanged(stable=stable, rows=dict(self._rows) if kept else {})


def rows_to_repeat(manifest: Manifest, directory: str, stable: Collection[str]) -> dict[Key, Row]:
    """Rows of stable tensors as a checkpoint beside `directory` has them; only bytes that the run owns."""
    wanted = pc.call_function(
        "is_in", [manifest.table.column("tensor")], pc.SetLookupOptions(pa.array(sorted(stable), pa.string()))
    )
    places = [i for i, chosen in enumerate(wanted.to_pylist()) if chosen]
    found: dict[Key, Row] = {}
    for row in manifest.rows(places):
        owned = "://" not in row.file and not row.file.startswith("/")
        if owned and row.hash is not None:
            path = posixpath.normpath(posixpath.join(directory, row.file))
            parent = posixpath.dirname(directory)
            found[row.tensor, row.state, row.dtype, row.shape, row.box] = replace(
                row, file=f"../{posixpath.relpath(path, parent)}"
            )
    return found
