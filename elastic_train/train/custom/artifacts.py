"""Files that a loop leaves with a step: written beside it on each rank, and brought to storage by one.

All ranks run the same code, so each has the files of the last step until the next one is committed: where the
rank that brings them is lost, another has them.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path

from elastic_train.errors import ConfigError, StorageError
from elastic_train.storage.artifacts import keep_newest, steps_of, write_files
from elastic_train.storage.outlast import outlast
from elastic_train.storage.store import Store

log = logging.getLogger(__name__)
BYTES = 256 << 20
"""Of a step."""
FILES = 1000
"""Of a step."""
STEPS = 1000
"""Newest steps whose files stay."""


class Artifacts:
    """Of one process. It lasts over generations."""

    def __init__(self, opened: Callable[[], Store]) -> None:
        self._opened = opened
        self._store: Store | None = None
        self._known: set[int] | None = None  # steps in storage
        self._root: Path | None = None  # removed with this object

    def of(self, step: int) -> Path:
        """The directory for files of a step."""
        if self._root is None:
            self._root = Path(tempfile.mkdtemp(prefix="elastic_train_artifacts-"))
            weakref.finalize(self, shutil.rmtree, self._root, ignore_errors=True)
        made = self._root / str(step)
        made.mkdir(exist_ok=True)
        return made

    def enter(self, step: int) -> None:
        """Training goes on after a step: what a later one left is not so."""
        for later, directory in self._steps():
            if later > step:
                shutil.rmtree(directory)

    def bring(
        self,
        step: int,
        *,
        uploads: bool,
        ends_within_s: float | None = None,
        waits: Callable[[], None] = lambda: None,
    ) -> None:
        """Bring what was written up to a step to storage, on the rank that `uploads`; the others keep what is
        of this step. Storage that fails is tried again with the next step. Where there is none, the others
        keep nothing, and `ends_within_s` says for how many seconds trouble of the storage is waited out:
        `waits` is called before each wait.
        """

        def said(trouble: str) -> None:
            log.warning("files of a step: %s", trouble)
            waits()

        for number, directory in self._steps():
            if not uploads:
                if number < step or ends_within_s is not None:
                    shutil.rmtree(directory)
                continue
            files = {str(f.relative_to(directory)): f for f in sorted(directory.rglob("*")) if f.is_file()}
            _check(number, files)
            write = partial(self._write, number, files)
            try:
                write() if ends_within_s is None else outlast(write, ends_within_s, said=said)
            except StorageError as error:
                log.warning("the files of step %d could not be written: %s", number, error)
                return
            shutil.rmtree(directory)

    def _write(self, step: int, files: dict[str, Path]) -> None:
        if not files:
            return
        store = self._store = self._store or self._opened()
        write_files(store, step, files)
        known = self._known = {step} | (self._known if self._known is not None else set(steps_of(store)))
        try:
            self._known = keep_newest(store, known, STEPS)
        except StorageError as error:  # what is written is written
            log.warning("files of old steps were not deleted; the next step tries again: %s", error)

    def _steps(self) -> list[tuple[int, Path]]:
        if self._root is None:
            return []
        return sorted((int(each.name), each) for each in self._root.iterdir())


def _check(step: int, files: dict[str, Path]) -> None:
    """ConfigError for more than a run may be loaded with."""
    size = sum(file.stat().st_size for file in files.values())
    if size > BYTES or len(files) > FILES:
        raise ConfigError(
            field="ctx.artifacts",
            problem=f"step {step} has {len(files)} files of {size >> 20} MiB; {FILES} files and "
            f"{BYTES >> 20} MiB are the most.",
            remedy="Write large results to storage of your own, or leave more of them out.",
        )
