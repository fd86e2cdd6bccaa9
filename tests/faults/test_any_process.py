"""What a person or a machine may do to any process of a run at any moment, on a cluster that outlives it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from elastic_train.cli.exit_codes import FINISHED, STOPPED, USAGE
from elastic_train.testing.ray_processes import RayProcesses, commands_below
from tests.cluster.conftest import Jobs, environment_of, eventually, small_job
from tests.cluster.small_job import EVERY

pytestmark = [pytest.mark.ring4, pytest.mark.matrix, pytest.mark.timeout(900)]
ONE = ("--workers", "1:1", "--standby", "0")
SLOW = ("--seconds-per-sample", "0.05")
LEFT_S = 60.0
STEPS = 90
KINDS = ("Rendezvous", "PeerStore", "Controller", "Worker")


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    environment = environment_of(tmp_path_factory.mktemp("home"))
    with RayProcesses(environment, head_cpus=2) as cluster:
        yield Jobs(cluster, tmp_path_factory.mktemp("runs"), copied=False)


@contextmanager
def driver(
    jobs: Jobs, name: str, *options: str, log: str = ""
) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    where = ("--address", jobs.cluster.address, "--storage", str(jobs.storage), "--name", name)
    file = jobs.storage / f"{log or name}.log"
    with small_job(jobs.cluster.environment, file, *where, *ONE, *options) as driver:
        yield driver


def process_of(jobs: Jobs, kind: str) -> int:
    """The newest process of a kind: one run is under way."""
    assert jobs.cluster.head is not None
    below = commands_below(jobs.cluster.head)
    return max(pid for pid, command in below.items() if " ".join(command).startswith(f"ray::{kind}"))


def came_to(log: Path, step: int) -> bool:
    return any(int(found) >= step for found in re.findall(r"step (\d+)/", log.read_text()))


def nothing_is_left(jobs: Jobs) -> None:
    eventually("the end of its processes", lambda: not jobs.left(), LEFT_S)


@pytest.mark.parametrize("seconds", [None, 4.0, 25.0], ids=["killed", "stopped shortly", "stopped"])
def test_every_process_of_a_run_may_end_or_stand_still(jobs: Jobs, seconds: float | None) -> None:
    """One after the other. 25 s is longer than a lease and than a silence that is borne."""
    name, steps = f"each-{seconds}", STEPS + int(16 * (seconds or 0.0))  # it goes on while others stand still
    with driver(jobs, name, "--max-steps", str(steps), *SLOW) as (process, log):
        for number, kind in enumerate(KINDS):
            eventually("more steps", lambda number=number: came_to(log, 12 + 15 * number))
            assert process.poll() is None, log.read_text()
            pid = process_of(jobs, kind)
            if seconds is None:
                os.kill(pid, signal.SIGKILL)
            else:
                os.kill(pid, signal.SIGSTOP)
                time.sleep(seconds)
                with suppress(ProcessLookupError):  # whoever stood still for too long was replaced
                    os.kill(pid, signal.SIGCONT)
        assert process.wait(300.0) == FINISHED, log.read_text()
    book = jobs.ledger(name)
    assert sorted(book.losses) == list(range(1, steps + 1))
    assert "driver has been silent" not in log.read_text(), "who stood still was the controller"
    assert len(book.superseded) <= 2 * EVERY
    nothing_is_left(jobs)


def test_a_driver_that_stands_still_is_waited_for(jobs: Jobs) -> None:
    steps = 2 * STEPS
    with driver(jobs, "dozing", "--max-steps", str(steps), *SLOW) as (process, log):
        eventually("step 12", lambda: came_to(log, 12))
        process.send_signal(signal.SIGSTOP)
        time.sleep(40.0)  # longer than a driver that is gone may be silent
        process.send_signal(signal.SIGCONT)
        assert process.wait(300.0) == FINISHED, log.read_text()
    book = jobs.ledger("dozing")
    assert sorted(book.losses) == list(range(1, steps + 1))
    assert book.superseded == ()
    nothing_is_left(jobs)


def test_of_two_drivers_at_once_one_runs_and_the_other_is_refused(jobs: Jobs) -> None:
    options = ("--max-steps", "40", *SLOW)
    with (
        driver(jobs, "twins", *options, log="twin-1") as (first, log),
        driver(jobs, "twins", *options, log="twin-2") as (second, other),
    ):
        codes = {first.wait(300.0), second.wait(300.0)}
    assert codes == {FINISHED, USAGE}, log.read_text() + other.read_text()
    assert "already active" in log.read_text() + other.read_text()
    book = jobs.ledger("twins")
    assert sorted(book.losses) == list(range(1, 41))
    assert book.superseded == ()
    nothing_is_left(jobs)


def test_a_run_that_is_submitted_again_while_it_stops_loses_nothing(jobs: Jobs) -> None:
    options = ("--max-steps", "40", *SLOW)
    with driver(jobs, "again", *options) as (first, log):
        eventually("step 12", lambda: came_to(log, 12))
        first.send_signal(signal.SIGINT)
        with driver(jobs, "again", *options, log="again-2") as (second, other):
            assert first.wait(120.0) == STOPPED, log.read_text()
            assert second.wait(240.0) in (FINISHED, USAGE), other.read_text()
    with driver(jobs, "again", *options, log="again-3") as (third, last):
        assert third.wait(240.0) == FINISHED, last.read_text()
    book = jobs.ledger("again")
    assert sorted(book.losses) == list(range(1, 41))
    assert book.superseded == (), "the stop kept its checkpoint"
    nothing_is_left(jobs)


@pytest.mark.parametrize("moment", [0.5, 2.0, 4.0, 7.0, "run ", "joined", "forming"], ids=str)
def test_two_interrupts_during_the_start_leave_nothing(jobs: Jobs, moment: float | str) -> None:
    name = f"twice-{re.sub('[^a-z0-9]+', '-', str(moment))}"
    with driver(jobs, name, "--max-steps", "2000", *SLOW) as (process, log):
        if isinstance(moment, str):
            eventually(moment, lambda: moment in log.read_text())
        else:
            time.sleep(moment)
        process.send_signal(signal.SIGINT)
        time.sleep(0.4)
        process.send_signal(signal.SIGINT)
        code = process.wait(LEFT_S)
    assert code == STOPPED or "KeyboardInterrupt" in log.read_text(), log.read_text()
    nothing_is_left(jobs)
