"""A server that another package brings, as a process for as long as a block lasts."""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

READY_S = 60.0


@contextmanager
def served(command: Sequence[str], directory: Path, ready: Callable[[], object]) -> Iterator[None]:
    """Run a server, its log in `directory`, from the moment when `ready` raises no OSError any more.

    It is killed at the end of the block, and by Linux where this process is: the tests may be.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with_us = ("setpriv", "--pdeathsig", "KILL") if shutil.which("setpriv") else ()
    with (directory / "server.log").open("wb") as log:
        process = subprocess.Popen([*with_us, *command], stdout=log, stderr=log, cwd=directory)
    try:
        _until(ready, process, command[0])
        yield
    finally:
        process.kill()
        process.wait()


def _until(ready: Callable[[], object], process: subprocess.Popen[bytes], name: str) -> None:
    started, pause = time.monotonic(), threading.Event()
    while True:
        try:
            ready()
        except OSError as error:
            if process.poll() is not None or time.monotonic() - started > READY_S:
                raise RuntimeError(f"{name} did not come up: {error}") from error
            pause.wait(0.1)
        else:
            return
