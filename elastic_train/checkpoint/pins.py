"""Pins: records in a run's log that keep its files while another run refers to them.

A pin is a record of the owner's commit log, in one order with its prunes. If a prune came first the pin is
refused; if the pin came first, the prune's second look finds it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from elastic_train.checkpoint.garbage import files_of
from elastic_train.checkpoint.run_directory import RunDirectory
from elastic_train.errors import CheckpointError, ConfigError, StorageError
from elastic_train.storage.fsspec_store import Options, open_store

_OF_A_RUN = re.compile(r"(?P<run>.+)/(?P<file>checkpoints/step-\d{10,}\.g\d+/[^/]+)")
COPY = "Copy the bytes instead: `--copy`, or ResumeFrom(..., copy=True)."


def pin(files: Iterable[str], *, reader: str, options: Options | None = None) -> tuple[str, ...]:
    """Pin these files, given as absolute paths or URLs, in the runs that they belong to; those runs.

    Files of no run aren't anybody's to delete. ConfigError where a pin isn't possible.
    """
    by_run: dict[str, set[str]] = {}
    for file in files:
        found = _OF_A_RUN.fullmatch(file)
        if found is not None:
            by_run.setdefault(found["run"], set()).add(found["file"])
    pinned: list[str] = []
    for url, wanted in sorted(by_run.items()):
        run = RunDirectory(open_store(url, options=options))
        try:
            if run.log.records():
                _pin(run, wanted, reader)
                pinned.append(url)
        except (StorageError, CheckpointError) as error:
            problem = f"the run {url} can't be made to keep the files that are to be read there: {error}"
            raise ConfigError(field="SOURCE", problem=problem, remedy=COPY) from error
    return tuple(pinned)


def _pin(run: RunDirectory, wanted: set[str], reader: str) -> None:
    """Pin the fewest checkpoints that name all of the files, newest first."""
    held = {
        record.slot: (record, files_of(run.store, record)) for record in (*run.log.pins(), *run.log.valid())
    }
    left = set(wanted)
    while left:
        best = max(held.values(), key=lambda h: (len(h[1] & left), h[0].slot), default=None)
        if best is None or not best[1] & left:
            raise ConfigError(
                field="SOURCE",
                problem=f"no checkpoint that {run.store.url} keeps names {min(left)}, so it may go any time.",
                remedy=COPY,
            )
        run.pin(best[0], reader)
        left -= best[1]
