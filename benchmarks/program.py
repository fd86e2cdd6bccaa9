"""A measuring program in a process of its own, with the cluster that it starts: what it wrote."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

LOOK_S = 1.0
ENDS_S = 60.0  # what a program may take to end its cluster once it is interrupted
LAST_WORDS = 1500  # characters of its output, where it failed


def command_of(module: str, *words: str, python: str = sys.executable) -> list[str]:
    return [python, "-m", module, *words]


def measured(command: Sequence[str], limit_s: float, told: Callable[[Path], None] = lambda file: None) -> Any:
    """What the command wrote to the file that `--json` names. A problem is a result too: a table whose
    "problem" says how the program ended, with what it had written.

    `told` looks at the file now and then, for those who watch.
    """
    with tempfile.TemporaryDirectory(prefix="et-bench-") as directory:
        file, log = Path(directory) / "result.json", Path(directory) / "log"
        with log.open("wb") as out:
            program = psutil.Popen([*command, "--json", str(file)], stdout=out, stderr=subprocess.STDOUT)
            try:
                late = not _over(program, limit_s, lambda: told(file))
            finally:
                _end(program)
        found = written(file)
        if late:
            problem = f"it was not over after {limit_s:.0f} s, and was ended"
        elif program.returncode or found == {}:
            problem = f"exit code {program.returncode}: {log.read_text()[-LAST_WORDS:]}"
        else:
            return found
        return {**(found if isinstance(found, dict) else {}), "problem": problem}


def written(file: Path) -> Any:
    """What a program has written so far."""
    return json.loads(file.read_text()) if file.exists() and file.stat().st_size else {}


def load() -> float:
    """Of this machine, over the last minute."""
    return round(os.getloadavg()[0], 1)


def _over(program: psutil.Popen, limit_s: float, look: Callable[[], None]) -> bool:
    until = time.monotonic() + limit_s
    while program.poll() is None and time.monotonic() < until:
        with suppress(psutil.TimeoutExpired):
            program.wait(LOOK_S)
        look()
    return program.poll() is not None


def _end(program: psutil.Popen) -> None:
    """As a person would, where it still runs: a program ends its cluster when it is interrupted. What it
    leaves behind goes too.
    """
    if program.poll() is not None:
        return
    tree = [psutil.Process(program.pid), *program.children(recursive=True)]
    program.send_signal(signal.SIGINT)
    with suppress(psutil.TimeoutExpired):
        program.wait(ENDS_S)
    for process in tree:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(tree, timeout=10.0)
