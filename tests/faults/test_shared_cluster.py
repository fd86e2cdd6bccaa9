"""Several runs on one cluster, drivers that are killed at every point of a run, and a head that is lost.

Nobody touches what is another's, and nothing is left.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elastic_train.cli.exit_codes import FINISHED, INFRASTRUCTURE, STOPPED
from elastic_train.control.events import WorkerLost, WorkerReady
from elastic_train.testing.ray_processes import RayProcesses, commands_below
from tests.cluster.conftest import OURS, Jobs, environment_of, eventually, segments_of, small_job
from tests.cluster.small_job import EVERY

pytestmark = [pytest.mark.ring4, pytest.mark.matrix, pytest.mark.timeout(900)]
ONE = ("--workers", "1:1", "--standby", "0")
SLOW = ("--seconds-per-sample", "0.05")
FAST = ("--seconds-per-sample", "0.001")  # the same samples
LEFT_S = 150.0
"""Three leases that a driver may be silent, a stop with its checkpoint, and a busy machine."""


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    environment = environment_of(tmp_path_factory.mktemp("home"))
    with RayProcesses(environment, head_cpus=6) as cluster:
        yield Jobs(cluster, tmp_path_factory.mktemp("runs"), copied=False)


@contextmanager
def driver(jobs: Jobs, name: str, *options: str) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A run's driver, and what it printed."""
    where = ("--address", jobs.cluster.address, "--storage", str(jobs.storage), "--name", name)
    with small_job(jobs.cluster.environment, jobs.storage / f"{name}.log", *where, *ONE, *options) as driver:
        yield driver


def said(log: Path, what: str) -> None:
    eventually(what, lambda: re.search(what, log.read_text()))


def worker_of(jobs: Jobs, name: str) -> int:
    """The process of a run's newest worker."""
    return [r.event.pid for r in jobs.records(name) if isinstance(r.event, WorkerReady)][-1]


def nothing_is_left(jobs: Jobs, *runs: str) -> None:
    """No process, no shared memory, no lease, no unfinished file."""
    eventually("the end of its processes", lambda: not jobs.left(), LEFT_S)
    eventually("the end of its memory", lambda: not segments_of(*runs), 30.0)
    assert not list(jobs.storage.rglob(".tmp-*"))


@pytest.mark.parametrize("others", [1, 4])
def test_what_happens_to_one_run_happens_to_no_other(jobs: Jobs, others: int) -> None:
    """One loses its worker, one its driver, one is stopped; the rest trains as if alone."""
    names = [f"r{others}{n}" for n in range(others + 1)]
    drivers = [driver(jobs, name, "--max-steps", "400", *SLOW) for name in names]
    entered = [one.__enter__() for one in drivers]
    try:
        for name, (_, log) in zip(names, entered, strict=True):
            said(log, r"step [1-9]")
            eventually("its journal", lambda name=name: jobs.reached(name, 1))
        os.kill(worker_of(jobs, names[0]), signal.SIGKILL)
        said(entered[0][1], r"lost w\d+ on node \w+: 1 worker, ")
        if others > 1:
            entered[1][0].kill()
            entered[2][0].send_signal(signal.SIGINT)
            assert entered[2][0].wait(120.0) == STOPPED
        untouched = names[-1]
        seen = entered[-1][1].read_text()
        assert "lost w" not in seen
        assert not [r for r in jobs.records(untouched) if isinstance(r.event, WorkerLost)]
        steps = len(jobs.ledger(untouched).losses)
        eventually("its next steps", lambda: len(jobs.ledger(untouched).losses) > steps + 10)
        for process, _ in entered:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
        for (process, log), name in zip(entered, names, strict=True):
            if not (others > 1 and name == names[1]):
                assert process.wait(180.0) in (STOPPED, FINISHED), log.read_text()
    finally:
        for one in drivers:
            one.__exit__(None, None, None)
    nothing_is_left(jobs, *names)


HOLDS = """
import sys, time, ray
from pathlib import Path

@ray.remote(num_cpus=1)
def hold(mark):
    Path(mark, str(time.monotonic_ns())).touch()
    while Path(mark).exists() and Path(mark, "go-on").exists():
        time.sleep(0.2)

ray.init(address=sys.argv[1], logging_level=40)
ray.get([hold.remote(sys.argv[2]) for _ in range(int(ray.cluster_resources()["CPU"]))])
"""


def test_room_that_plain_tasks_hold_is_waited_for_and_they_are_named(jobs: Jobs, tmp_path: Path) -> None:
    """They are no actors: nothing that Ray lists of a cluster says that they hold it."""
    mark = tmp_path / "mark"
    mark.mkdir()
    (mark / "go-on").touch()
    command = [sys.executable, "-c", HOLDS, jobs.cluster.address, str(mark)]
    with subprocess.Popen(command, env=jobs.cluster.environment) as holding:
        try:
            eventually("tasks on all CPUs", lambda: len(list(mark.iterdir())) == 1 + 6)
            waits = ("--max-steps", "10", "--wait-for-capacity-s", "300")
            with driver(jobs, "held", *waits, *FAST) as (process, log):
                named = r"waits for room on \w+: a task in process \d+"
                eventually(
                    "its word", lambda: [r for r in jobs.records("held") if re.search(named, r.reason)]
                )
                assert process.poll() is None, log.read_text()
                (mark / "go-on").unlink()
                assert process.wait(300.0) == FINISHED, log.read_text()
        finally:
            (mark / "go-on").unlink(missing_ok=True)
            assert holding.wait(60.0) == 0
    assert not [r for r in jobs.records("held") if "quarantine" in r.reason], "no node is to blame"


POINTS = (
    "joined",
    "forming dp 1",
    r"on 1 node  restarts \d+\n",
    "step [1-9]",
    r"step (9|1\d)/",
    r"step [2-9]\d/",
)


@pytest.mark.parametrize("moment", [*POINTS, 0.3, 1.0, 2.0, 4.0, 6.0], ids=str)
def test_a_driver_that_is_killed_leaves_nothing(jobs: Jobs, moment: str | float) -> None:
    """At a word that it said, or so many seconds after it began; thrice in one run."""
    name = f"killed-{re.sub('[^a-z0-9]+', '-', str(moment)).strip('-')}"
    for _ in range(3):
        with driver(jobs, name, "--max-steps", "2000", *SLOW) as (process, log):
            if isinstance(moment, str):
                said(log, moment)
            else:
                time.sleep(moment)
            process.kill()
    nothing_is_left(jobs, name)


def test_a_lost_head_leaves_nothing_and_the_run_goes_on_elsewhere(tmp_path: Path) -> None:
    """The node with its workers lives on; nobody is there any more who could tell them to end."""
    environment = environment_of(tmp_path / "home")
    with RayProcesses(environment) as cluster:
        node = cluster.add_node(2)
        headless = Jobs(cluster, tmp_path, copied=False)
        with driver(headless, "headless", "--max-steps", "60", *SLOW) as (process, log):
            said(log, r"step (2[5-9]|3\d)/")
            cluster.kill_head()
            assert process.wait(300.0) == INFRASTRUCTURE, log.read_text()
            assert "docs/errors.md#headlost" in log.read_text()
            assert "The program will terminate" not in log.read_text(), "ours is the first word"
        eventually(
            "the end of its processes",
            lambda: (
                not node.is_running()
                or not [c for c in commands_below(node).values() if " ".join(c).startswith(OURS)]
            ),
            LEFT_S,
        )
        eventually("the end of its memory", lambda: not segments_of("headless"), 30.0)
        cluster.start_head()
        cluster.add_node(2)
        with driver(headless, "headless", "--max-steps", "60", *FAST) as (process, log):
            assert process.wait(240.0) == FINISHED, log.read_text()
        book = headless.ledger("headless")
        assert sorted(book.losses) == list(range(1, 61))
        assert len(book.superseded) <= 2 * EVERY
        nothing_is_left(headless, "headless")
