"""Clocks that differ between nodes, and a clock that is set under a run: nothing is decided by them."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from elastic_train.cli.exit_codes import FINISHED
from elastic_train.control.events import WorkerLost
from elastic_train.observe.goodput import goodput
from elastic_train.observe.ledger import ledger
from elastic_train.testing.ray_processes import RayProcesses
from tests.cluster.conftest import Jobs, environment_of, eventually, small_job
from tests.places.conftest import saved

pytestmark = [pytest.mark.ring4, pytest.mark.matrix, pytest.mark.timeout(600)]

STEPS, LEASE_S = 60, 8.0  # of the small job
PATIENT = ("--wait-for-capacity-s", "300")


class Clock:
    """The wall clock that Python sees in processes which are started with `environment`. Their waits are by
    other clocks, as the kernel's own are where a clock is set.
    """

    def __init__(self, library: Path, file: Path) -> None:
        self._file = file
        self.environment = {"LD_PRELOAD": str(library), "WALL_CLOCK_OFFSET": str(file)}
        file.write_bytes(struct.pack("<q", 0))

    def ahead(self, seconds: int) -> None:
        with self._file.open("r+b") as file:  # it is mapped: the same file, changed in place
            file.write(struct.pack("<q", seconds))

    def now(self) -> float:
        """What such a process sees."""
        asked = [sys.executable, "-c", "import time; print(time.time())"]
        said = subprocess.run(
            asked, env=os.environ | self.environment, capture_output=True, text=True, check=True
        )
        return float(said.stdout)


@pytest.fixture
def clock(tmp_path: Path) -> Clock:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler for what moves the clock")
    library = tmp_path / "wall_clock.so"
    source = str(Path(__file__).with_name("wall_clock.c"))
    command = [compiler, "-O1", "-shared", "-fPIC", "-o", str(library), source, "-ldl"]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"what moves the clock can't be compiled here: {made.stderr}")
    return Clock(library, tmp_path / "offset")


def test_the_clock_of_one_node_is_a_minute_ahead(clock: Clock, tmp_path: Path) -> None:
    clock.ahead(60)
    assert clock.now() - time.time() == pytest.approx(60.0, abs=30.0)
    environment = environment_of(tmp_path / "home")
    with RayProcesses(environment) as cluster:
        cluster.add_node()
        cluster.environment |= clock.environment
        cluster.add_node()
        jobs = Jobs(cluster, tmp_path, copied=False)
        where = ("--address", cluster.address, "--storage", str(tmp_path), "--name", "skewed")
        few = ("--max-steps", "20", "--workers", "2:2", "--standby", "0", *PATIENT)
        with small_job(environment, tmp_path / "skewed.log", *where, *few) as (process, log):
            assert process.wait(400.0) == FINISHED, log.read_text()
        print(log.read_text())
        trained_as_if_nothing_was(jobs, "skewed", 20)


def test_a_clock_that_is_set_under_a_run(clock: Clock, tmp_path: Path) -> None:
    """By more than a lease and every deadline; that of the controller, the workers and the driver."""
    environment = environment_of(tmp_path / "home") | clock.environment
    with RayProcesses(environment, head_cpus=2) as cluster:
        jobs = Jobs(cluster, tmp_path, copied=False)
        where = ("--address", cluster.address, "--storage", str(tmp_path), "--name", "set")
        slow = ("--max-steps", str(STEPS), "--workers", "2:2", "--standby", "0", *PATIENT)
        with small_job(environment, tmp_path / "set.log", *where, *slow, "--seconds-per-sample", "0.1") as (
            process,
            log,
        ):
            for number, offset in enumerate((90, -90)):
                eventually("its steps", lambda at=10 * (number + 1): jobs.reached("set", at), 400.0)
                clock.ahead(offset)
                time.sleep(2 * LEASE_S)
                assert process.poll() is None, log.read_text()
            assert process.wait(400.0) == FINISHED, log.read_text()
        print(log.read_text())
        trained_as_if_nothing_was(jobs, "set", STEPS)


def trained_as_if_nothing_was(jobs: Jobs, name: str, steps: int) -> None:
    """Every step once, in one group, under one controller."""
    records = jobs.records(name)
    book = ledger(records)
    assert sorted(book.losses) == [*range(1, steps + 1)]
    assert book.superseded == ()
    assert not [r.reason for r in records if isinstance(r.event, WorkerLost)]
    assert sum(r.formed is not None for r in records) == 1
    assert saved(jobs.storage, name) == steps
    assert goodput(records).share <= 1.0
