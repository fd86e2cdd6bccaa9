"""What a worker's process prints, by whatever means, goes into the run's storage with its rank and time.

Ray gives each process files for its output. They are read behind the printing code, so that nothing it does
is slowed down or changed.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from elastic_train.errors import StorageError
from elastic_train.storage.job_output import OutputLine, OutputWriter

LOOK_S, FLUSH_S = 0.25, 2.0
BEHIND = 1 << 20
"""Bytes of one stream that may be unread; of more, the newest are kept."""
LINE = 8 << 10
RAYS = (":job_id:", ":actor_name:", ":task_name:")
"""Lines that Ray writes for its own reader begin so."""

Stream = Literal["out", "err"]


class CapturedOutput:
    """Reads the output of this process on a thread of its own. Storage that fails is tried again later."""

    def __init__(self, writer: OutputWriter, *, worker: str, rank: Callable[[], int]) -> None:
        self._writer, self._worker, self._rank = writer, worker, rank
        files = [_Tail(1, "out"), _Tail(2, "err")]
        self._tails = [tail for tail in files if tail.path is not None]
        self._wanted, self._flushed = threading.Event(), threading.Event()
        if self._tails:
            threading.Thread(target=self._run, name="output", daemon=True).start()

    def flush(self, wait_s: float) -> None:
        """What was printed so far goes to storage, which is waited for as long."""
        if self._tails:
            self._flushed.clear()
            self._wanted.set()
            self._flushed.wait(wait_s)

    def _run(self) -> None:
        with suppress(StorageError):
            self._writer.make_room()
        waited = 0.0
        while True:
            wanted = self._wanted.wait(LOOK_S)
            self._wanted.clear()
            self._look()
            waited += LOOK_S
            if not (wanted or waited >= FLUSH_S):
                continue
            waited = 0.0
            with suppress(StorageError):
                self._writer.flush()
            if wanted:
                self._flushed.set()

    def _look(self) -> None:
        now, rank = datetime.now(UTC).isoformat(timespec="milliseconds"), self._rank()
        for tail in self._tails:
            lines = [
                OutputLine(at=now, worker=self._worker, rank=rank, stream=tail.stream, text=text)
                for text in tail.read()
                if not text.startswith(RAYS)
            ]
            if lines:
                self._writer.add(lines)


class _Tail:
    """Whole lines of what this process writes to a file descriptor from now on, if that is a file."""

    def __init__(self, number: int, stream: Stream) -> None:
        self.stream: Stream = stream
        regular = stat.S_ISREG(os.fstat(number).st_mode)
        self.path = Path(f"/proc/self/fd/{number}").readlink() if regular else None
        self._at = os.fstat(number).st_size if regular else 0
        self._rest = b""

    def read(self) -> list[str]:
        assert self.path is not None
        try:
            with self.path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                left_out = max(0, size - self._at - BEHIND)
                file.seek(self._at + left_out)
                data = file.read(BEHIND)
        except OSError:  # the session is being removed
            return []
        self._at += left_out + len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LINE:
            lines, self._rest = [*lines, self._rest], b""
        said = [line[:LINE].decode(errors="replace").rstrip("\r") for line in lines]
        return [f"({left_out:,} bytes of output were left out)", *said] if left_out else said
