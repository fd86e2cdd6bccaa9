"""A run's checkpoints as Ray Train knows them: directories of a file system of Arrow's.

The file system is the one that the run itself has its storage by. Arrow's own knows fewer URLs, none with a
space in it, and nothing of an endpoint or of credentials in fsspec's configuration.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from fsspec import AbstractFileSystem
from pyarrow.fs import FileSystem, FSSpecHandler, LocalFileSystem, PyFileSystem
from ray import train

from elastic_train.checkpoint.run_directory import RunDirectory
from elastic_train.storage.fsspec_store import child_url, file_system
from elastic_train.storage.urls import is_local, parse

WithMetrics = tuple[train.Checkpoint, dict[str, Any]]


class RayCheckpoints:
    """Those of the run at `url`, a path or a URL."""

    def __init__(self, url: str) -> None:
        self._url = url

    @cached_property
    def system(self) -> FileSystem:
        """What they and the run's directory are in."""
        return LocalFileSystem() if is_local(self._url) else PyFileSystem(FSSpecHandler(self._driver))

    def at(self, path: str) -> train.Checkpoint:
        """The one of a path in the run's directory."""
        root = parse(child_url(self._url, path)).root
        if not is_local(self._url) and not root.startswith(self._driver.root_marker):
            root = self._driver.root_marker + root
        return train.Checkpoint(root, filesystem=self.system)

    @cached_property
    def _driver(self) -> AbstractFileSystem:
        return file_system(self._url)

    def kept(self, run: RunDirectory) -> list[WithMetrics]:
        """In the order of their commits, with what is known of their steps. NoCheckpoint where there were
        some and none is left.
        """
        newest = run.newest()
        records = run.records() if newest is not None else ()
        return [
            (self.at(record.path), {"step": record.step, **dict(record.metrics)})
            for record in records
            if record.kind == "commit"
        ]
