"""Resolve RUN on the command line to a run directory, or say what is missing."""

from __future__ import annotations

import platform
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice

from elastic_train.checkpoint.importers.detect import is_file
from elastic_train.checkpoint.importers.openable import local_path, what_to_open
from elastic_train.checkpoint.run_directory import CONFIG, RunDirectory
from elastic_train.errors import NoCheckpoint, StorageNotFound
from elastic_train.storage.fsspec_store import is_local, open_store

LEASE = "lease.json"


@contextmanager
def absence_told(*urls: str) -> Iterator[None]:
    """Where no checkpoint was found, say of a path that nothing is there at all."""
    try:
        yield
    except NoCheckpoint:
        for url in urls:
            _check_there(url)
        raise


def run_there(run: str) -> RunDirectory:
    """The directory of a run that began, whether or not it committed anything."""
    _check_there(run)
    if is_local(run) and is_file(run):
        raise NoCheckpoint(url=run, problem="this is a file, and a run is a directory.")
    store = open_store(run)
    directory = RunDirectory(store)
    if not directory.records() and not directory.log.records() and not _began(directory):
        raise NoCheckpoint(url=run, problem=f"there is no run here. {what_to_open(store, run)}")
    return directory


def this_command() -> str:
    """Who holds the lease of a run that this command changes."""
    return f"elastic-train ckpt on {platform.node()}, {uuid.uuid4().hex[:8]}"


def _began(directory: RunDirectory) -> bool:
    return directory.store.exists(CONFIG) or directory.store.exists(LEASE)


def _check_there(url: str) -> None:
    if is_local(url):
        there = local_path(url).exists()
    else:
        there = is_file(url) or any(True for _ in islice(open_store(url).list(), 1))
    if not there:
        raise StorageNotFound(path=url, operation="read", problem="there is nothing at this path.")
