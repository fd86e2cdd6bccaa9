"""Ctrl-C wherever a run may be: it ends as stopped, in time, and leaves nothing behind."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elastic_train.cli.exit_codes import FINISHED, STOPPED
from elastic_train.testing.ray_processes import RayProcesses
from tests.cluster.conftest import Jobs, environment_of, eventually, small_job

pytestmark = [pytest.mark.ring3, pytest.mark.matrix, pytest.mark.timeout(600)]
IN_TIME_S = 60.0  # on a machine that is busy with other things; seconds on an idle one
ONE = ("--workers", "1:1", "--standby", "0")


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    environment = environment_of(tmp_path_factory.mktemp("home"))
    with RayProcesses(environment, head_cpus=2) as cluster:
        yield Jobs(cluster, tmp_path_factory.mktemp("runs"), copied=False)


@contextmanager
def driver(jobs: Jobs, name: str, *options: str) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A run's driver in a terminal, and what it printed."""
    where = ("--address", jobs.cluster.address, "--storage", str(jobs.storage), "--name", name)
    with small_job(jobs.cluster.environment, jobs.storage / f"{name}.log", *where, *options) as driver:
        yield driver


def nothing_is_left(jobs: Jobs) -> None:
    eventually("the end of its processes", lambda: not jobs.left(), 60.0)


@pytest.mark.parametrize(
    ("name", "options", "said", "answer"),
    [
        ("waiting", ("--workers", "5:6"), "waiting", "stopped on request: SIGINT"),
        ("starting", ONE, "joined", "stopped on request: SIGINT"),
        ("running", (*ONE, "--seconds-per-sample", "0.05"), "step [1-9]", r"stopped at step \d+: SIGINT"),
    ],
    ids=["waiting", "starting", "running"],
)
def test_an_interrupt_stops_a_run(
    jobs: Jobs, name: str, options: tuple[str, ...], said: str, answer: str
) -> None:
    with driver(jobs, name, *options) as (process, log):
        eventually(said, lambda: re.search(said, log.read_text()))
        process.send_signal(signal.SIGINT)
        assert process.wait(IN_TIME_S) == STOPPED, log.read_text()
    assert re.search(answer, log.read_text())
    end = jobs.records(name)[-1]
    assert end.ended is not None
    assert end.ended[0] == "stopped"
    nothing_is_left(jobs)


def test_a_second_interrupt_waits_for_no_step(jobs: Jobs) -> None:
    options = (*ONE, "--seconds-per-sample", "60")
    with driver(jobs, "twice", *options) as (process, log):
        eventually("a group", lambda: re.search(r"on 1 node  restarts 0$", log.read_text(), re.MULTILINE))
        process.send_signal(signal.SIGINT)
        eventually("the first", lambda: "SIGINT" in log.read_text(), IN_TIME_S)
        assert process.poll() is None, "a step takes a quarter of an hour here"
        process.send_signal(signal.SIGINT)
        assert process.wait(IN_TIME_S) == STOPPED, log.read_text()
    end = jobs.records("twice")[-1]
    assert end.ended == ("stopped", "stopped at step 0: SIGINT, said again; nothing was saved")
    nothing_is_left(jobs)


def test_an_interrupt_after_the_last_step_leaves_a_finished_run(jobs: Jobs) -> None:
    options = (*ONE, "--max-steps", "6")
    with driver(jobs, "last", *options) as (process, log):
        eventually("the last step", lambda: "step 6/6" in log.read_text())
        process.send_signal(signal.SIGINT)
        assert process.wait(IN_TIME_S) == FINISHED, log.read_text()
    end = jobs.records("last")[-1]
    assert end.ended is not None
    assert end.ended[0] == "finished"
    nothing_is_left(jobs)


def test_two_runs_share_a_cluster(jobs: Jobs) -> None:
    options = (*ONE, "--max-steps", "8")
    with driver(jobs, "left", *options) as (left, reported), driver(jobs, "right", *options) as (right, too):
        assert left.wait(240.0) == FINISHED, reported.read_text()
        assert right.wait(240.0) == FINISHED, too.read_text()
    for name in ("left", "right"):
        assert sorted(jobs.ledger(name).losses) == list(range(1, 9))
    nothing_is_left(jobs)
