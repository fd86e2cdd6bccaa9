"""Note what was verified, so that a verification that was interrupted can go on.

A file of lines: whose it is, then a number for each batch of rows that was right. Damaged ones are not noted
and looked at again. What was right then is believed: a file that changed since is not noticed.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from elastic_train.checkpoint.verify_rows import RowColumns
from elastic_train.errors import ConfigError

FORMAT = "elastic_train.verified/1"
MOST_BYTES = 64 << 20


class VerifyLedger:
    """The numbers of `rows.batches()` that were right; safe to note from several threads."""

    def __init__(self, path: Path, *, url: str, rows: RowColumns) -> None:
        self._path = path
        self._head = json.dumps({"format": FORMAT, "checkpoint": url, "rows": rows.digest()}, sort_keys=True)
        self._lock = threading.Lock()
        self.noted = self._read()

    @contextmanager
    def open(self) -> Iterator[None]:
        """While it is open batches can be noted; ConfigError where it can't be written."""
        with self._written():
            self._file = self._path.open("a")
        with self._file:
            with self._written():
                self._file.truncate(self._whole)
            if not self._whole:
                self._line(self._head)
            yield

    def note(self, number: int) -> None:
        with self._lock:
            self._line(str(number))

    def _line(self, text: str) -> None:
        with self._written():
            self._file.write(f"{text}\n")
            self._file.flush()

    @contextmanager
    def _written(self) -> Iterator[None]:
        """What fails in it is the ledger's own: what fails between, of the checkpoint, is none of it."""
        try:
            yield
        except OSError as error:
            raise self._refused(
                f"can't be written ({error}).", "Name a file in a directory of yours."
            ) from error

    def _read(self) -> set[int]:
        self._whole = 0  # bytes up to the line that was begun when the last one was interrupted
        try:
            if self._path.stat().st_size > MOST_BYTES:
                raise self._refused("is too large to be one.", "Name another file.")
            data = self._path.read_bytes()
        except FileNotFoundError:
            return set()
        except OSError as error:
            raise self._refused(f"can't be read ({error}).", "Name another file.") from error
        self._whole = data.rfind(b"\n") + 1
        head, *lines = data[: self._whole].split(b"\n")
        if data and head != self._head.encode():
            raise self._refused(
                "was written for another checkpoint, or for other bytes of this one.", "Name another file."
            )
        return {int(line) for line in lines if line.isdigit()}

    def _refused(self, problem: str, remedy: str) -> ConfigError:
        return ConfigError(field="ledger", problem=f"{self._path} {problem}", remedy=remedy)
