"""The session of the page of commands, line by line as printed; only the page's port is another."""

from __future__ import annotations

import signal
import socket
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

from elastic_train.cli.exit_codes import STOPPED
from elastic_train.cli.report_and_ui import Reading
from elastic_train.errors import StorageNotFound
from tests.cluster.conftest import eventually
from tests.test_docs import blocks
from tests.walkthroughs.test_quickstart import environment, got, here, started, words

__all__ = ["here"]
pytestmark = [pytest.mark.ring4, pytest.mark.matrix, pytest.mark.timeout(560)]
PAGE = Path(__file__).parents[2] / "docs" / "commands.md"
STAYS = ("elastic-train run ", "elastic-train logs -f ", "elastic-train ui ")
"""What goes on until the run ends, or Ctrl-C."""


def step(run: Path) -> int:
    """The newest step of a run by its journal; -1 while there is none."""
    try:
        return Reading(str(run)).look().told.progress.step
    except StorageNotFound:
        return -1


def lines(port: int) -> list[str]:
    """The commands of the page, but for those that the tests of submitted jobs do."""
    found = [line.removeprefix("$ ") for block in blocks(PAGE, "console") for line in block.splitlines()]
    return [line.replace("8421", str(port)) for line in found if not line.startswith("ray job submit ")]


def carried_out(line: str, here: Path) -> None:
    done = subprocess.run(
        words(line), cwd=here, env=environment(), capture_output=True, text=True, timeout=300, check=False
    )
    print(f"$ {line}\n{done.stdout}{done.stderr}")
    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"


def test_the_session_of_the_page_works_line_by_line(here: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    run, url = here / "runs" / "pretrain_lm", f"http://127.0.0.1:{port}/"
    staying: dict[str, subprocess.Popen[bytes]] = {}

    def goes_on(by: int) -> None:
        reached = step(run) + by
        eventually(f"step {reached}", lambda: step(run) >= reached, 300)

    with ExitStack() as stack:
        for line in lines(port):
            verb = words(line)[1]
            if line.startswith(STAYS):
                staying[verb] = stack.enter_context(started(line, here, here / f"{verb}.log"))
            else:
                carried_out(line, here)
            if verb in ("run", "chaos"):
                goes_on(3)
            if verb == "ui":
                eventually("the page", lambda: "pretrain_lm" in got(url, staying["ui"], here / "ui.log"), 60)
            if verb == "stop":
                assert staying["run"].wait(120) == STOPPED
                assert staying["logs"].wait(60) == STOPPED
                staying["ui"].send_signal(signal.SIGINT)
                assert staying["ui"].wait(30) == 0
    assert {"pretrain_lm.html", "pretrain_lm.svg", "exported"} <= {file.name for file in here.iterdir()}
