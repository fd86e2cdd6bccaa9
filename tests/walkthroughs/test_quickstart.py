"""The quick start, command by command as the page prints it; only the port is another."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cluster.conftest import eventually
from tests.test_docs import blocks

pytestmark = [pytest.mark.ring4, pytest.mark.matrix, pytest.mark.timeout(560)]
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "quickstart.md"
OF_THE_CHECKOUT = ("make env", ". .venv/bin/activate")
"""What brought this environment about; a fresh clone tries it."""
STOPPED = 5


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A directory that looks like a checkout to the commands, and keeps what they write."""
    (tmp_path / "jobs").symlink_to(ROOT / "jobs")
    return tmp_path


def commands(port: int) -> list[list[str]]:
    """The commands of each console block."""
    found = [
        [line.removeprefix("$ ") for line in block.splitlines() if line.startswith("$ ")]
        for block in blocks(PAGE, "console")
    ]
    return [
        [line.replace("8420", str(port)) for line in block if not line.startswith(OF_THE_CHECKOUT)]
        for block in found
    ]


def of_storage() -> list[str]:
    """The commands of the runbook: they need a run's storage and nothing more of the reader."""
    found = [
        line.removeprefix("$ ").partition("  #")[0]
        for block in blocks(ROOT / "docs" / "runbook.md", "console")
        for line in block.splitlines()
    ]
    named = [line.replace("RUN", "runs/pretrain_lm").replace("STORAGE", "runs") for line in found]
    return [line for line in named if not line.startswith("elastic-train ui ")]  # the quick start has it


def environment() -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return own | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "RAY_AUTH_MODE": "disabled",
        "RAY_worker_niceness": "0",
    }


def words(line: str) -> list[str]:
    return shlex.split(line, comments=True)


@contextmanager
def started(line: str, here: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A command of another terminal, which Ctrl-C ends."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            words(line),
            cwd=here,
            env=environment(),
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


def step(port: int) -> int:
    """The run's step by its own page; -1 while there is none."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
            found = re.search(r"^elastic_train_step\{.*\} (\S+)$", answer.read().decode(), re.MULTILINE)
    except (urllib.error.URLError, OSError):
        return -1
    return int(float(found[1])) if found else 0


def goes_on(port: int, by: int) -> None:
    now = step(port)
    eventually(f"{by} more steps after {now}", lambda: step(port) >= now + by, 300)


def test_the_quick_start_works_as_printed(here: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (run,), chaos, (*reports, page), *_ = commands(port)
    began = time.monotonic()
    with started(run, here, here / "run.log") as training:
        eventually("the first step", lambda: step(port) > 0, 300)
        first = time.monotonic() - began
        for line in chaos:
            goes_on(port, 3)
            done = subprocess.run(
                words(line),
                cwd=here,
                env=environment(),
                capture_output=True,
                text=True,
                timeout=200,
                check=False,
            )
            assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        goes_on(port, 3)
        training.send_signal(signal.SIGINT)
        assert training.wait(120) == STOPPED, (here / "run.log").read_text()
    stopped = time.monotonic() - began
    said = (here / "run.log").read_text()
    assert f"page http://127.0.0.1:{port}/" in said
    assert said.count("lost w") >= 2
    assert "left node" in said
    for line in reports:
        done = subprocess.run(
            words(line), cwd=here, env=environment(), capture_output=True, text=True, timeout=100, check=False
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    assert {"pretrain_lm.html", "pretrain_lm.svg"} <= {file.name for file in here.iterdir()}
    for line in of_storage():
        done = subprocess.run(
            words(line), cwd=here, env=environment(), capture_output=True, text=True, timeout=100, check=False
        )
        assert done.returncode == (STOPPED if " logs " in line else 0), f"{line}\n{done.stdout}{done.stderr}"
    with started(page, here, here / "ui.log") as ui:
        url = "http://127.0.0.1:8420/"
        eventually("the page of what ended", lambda: "stopped" in got(url, ui, here / "ui.log"), 60)
        ui.send_signal(signal.SIGINT)
        assert ui.wait(30) == 0
    with started(run, here, here / "again.log") as training:
        eventually("the same command goes on", lambda: step(port) > 0, 300)
        training.send_signal(signal.SIGINT)
        assert training.wait(120) == STOPPED
    told = {"to the first step": first, "to the end": stopped, "commands": 2 + 1 + len(chaos) + len(reports)}
    print(f"\n{json.dumps(told)}\n{said}")


def got(url: str, ui: subprocess.Popen[bytes], log: Path) -> str:
    assert ui.poll() is None, log.read_text()
    try:
        with urllib.request.urlopen(url, timeout=20) as answer:
            return answer.read().decode()
    except (urllib.error.URLError, OSError):
        return ""
