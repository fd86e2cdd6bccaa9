"""Job files that cannot be run: what a person is told, and the exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from elastic_train.cli.exit_codes import STOPPED

pytestmark = pytest.mark.ring1


def test_what_a_job_makes_of_its_options_is_told_in_its_own_lines(tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_text(
        "import elastic_train as et\n"
        "def trainer(*, workers: str = '1:2') -> et.ElasticTrainer:\n"
        "    least, most = (int(number) for number in workers.split(':'))\n"
    )
    program = "from elastic_train.cli import main; main()"
    command = [sys.executable, "-c", program, "run", str(job), "--workers", "many"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert (
        "invalid literal for int() with base 10: 'many' on the driver while making the trainer" in done.stderr
    )
    assert "typer" not in done.stderr


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("import no_such_module\n", 1, "No module named 'no_such_module'"),
        ("def trainer(:\n", 1, "SyntaxError"),
        ("def other():\n    return None\n", 2, "defines no function `trainer(**options) -> ElasticTrainer`"),
        (None, 2, "there is no file"),
    ],
    ids=["import", "syntax", "trainer", "file"],
)
def test_a_job_file_that_cannot_be_loaded_is_told_before_anything_starts(
    tmp_path: Path, text: str | None, code: int, said: str
) -> None:
    job = tmp_path / "job.py"
    if text is not None:
        job.write_text(text)
    program = "from elastic_train.cli import main; main()"
    command = [sys.executable, "-c", program, "run", str(job)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert not (tmp_path / "runs").exists()


def interrupted(process: subprocess.Popen[bytes]) -> bytes:
    """What a process wrote that got SIGINT until it ended: Python loses one that comes within a finalizer."""
    for _ in range(5):
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=10)[1]
    raise AssertionError("it did not end")


def test_an_interrupt_before_the_run_begins_is_a_stop(tmp_path: Path) -> None:
    job, here = tmp_path / "job.py", tmp_path / "here"
    job.write_text(
        "import threading\n"
        "from pathlib import Path\n"
        "import elastic_train as et\n"
        "def trainer(*, here: str = '') -> et.ElasticTrainer:\n"
        "    Path(here).write_text(str(1))\n"
        "    threading.Event().wait(60)\n"
        "    raise AssertionError\n"
        "et.main(trainer)\n"
    )
    os.mkfifo(here)
    command = [sys.executable, str(job), "--here", str(here)]
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # who runs tests may ignore it
    with subprocess.Popen(command, stderr=subprocess.PIPE, preexec_fn=heard) as process:
        here.read_bytes()  # until it is there
        said = interrupted(process)
    assert process.returncode == STOPPED
    assert b"stopped on request: SIGINT" in said
