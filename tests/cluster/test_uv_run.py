"""A driver that `uv run` started: Ray starts workers by the same `uv run`, and they come and go as others."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from elastic_train.cli.exit_codes import FINISHED, STOPPED
from elastic_train.control.events import WorkerReady
from elastic_train.testing.ray_processes import RayProcesses, end_tree
from tests.cluster.conftest import SMALL_JOB, Jobs, environment_of, eventually

pytestmark = [pytest.mark.ring4, pytest.mark.matrix, pytest.mark.timeout(900)]
ENDLESS, KILLED_AT, MORE = 100_000, 4, 10
PROJECT = """
[project]
name = "job"
version = "0"
requires-python = ">=3.11"
dependencies = ["elastic_train"]
"""


def workers_of_uv(cluster: RayProcesses) -> list[psutil.Process]:
    """Workers of a run whose process is a child of `uv run`."""
    found: list[psutil.Process] = []
    for node in cluster.nodes:
        for process in node.children(recursive=True):
            try:
                command = (process.parent() or process).cmdline()
                if "ray::Worker" in " ".join(process.cmdline()) and command[1:2] == ["run"]:
                    found.append(process)
            except psutil.NoSuchProcess:
                continue
    return found


def test_workers_are_started_by_uv_and_one_that_is_killed_is_replaced(tmp_path: Path) -> None:
    if shutil.which("uv") is None:
        pytest.skip("there is no uv")
    project = tmp_path / "project"
    project.mkdir()
    (project / "pyproject.toml").write_text(PROJECT)
    shutil.copy(SMALL_JOB, project / "job.py")
    # The environment in which this runs, as it is: nothing is downloaded. A stop has time for a checkpoint.
    uv = {"UV_PROJECT_ENVIRONMENT": sys.prefix, "UV_OFFLINE": "1", "RAY_JOB_STOP_WAIT_TIME_S": "100"}
    environment = environment_of(tmp_path / "home") | uv
    with RayProcesses(environment) as cluster:
        for _ in range(3):
            cluster.add_node()
        jobs = Jobs(cluster, tmp_path, copied=False)
        command = ["uv", "run", "--no-sync", "python", "-u", "job.py", "--address", cluster.address]
        command += ["--storage", str(tmp_path), "--name", "uv", "--workers", "2:2", "--standby", "1"]
        command += ["--wait-for-capacity-s", "300", "--seconds-per-sample", "0.05", "--max-steps"]
        log = tmp_path / "log"
        with log.open("ab") as out:
            driver = psutil.Popen(
                [*command, str(ENDLESS)], cwd=project, env=environment, stdout=out, stderr=subprocess.STDOUT
            )
            try:
                eventually("its first steps", lambda: jobs.reached("uv", KILLED_AT), 400.0)
                eventually("all of them, the standby too", lambda: len(workers_of_uv(cluster)) == 3)
                first, before = first_of(jobs), groups(jobs)
                assert first in {process.pid for process in workers_of_uv(cluster)}, log.read_text()
                os.kill(first, signal.SIGKILL)
                eventually(
                    "a worker in its place",
                    lambda: groups(jobs) > before and len(workers_of_uv(cluster)) == 3,
                )
                driver.terminate()
                assert driver.wait(120.0) == STOPPED, log.read_text()
            finally:
                end_tree(driver, signal.SIGKILL)
            steps = max(jobs.ledger("uv").losses) + MORE
            again = subprocess.run(
                [*command, str(steps)],
                cwd=project,
                env=environment,
                stdout=out,
                stderr=subprocess.STDOUT,
                timeout=400,
            )
        print(log.read_text())
        assert again.returncode == FINISHED
        book = jobs.ledger("uv")
        assert sorted(book.losses) == [*range(1, steps + 1)]
        assert book.superseded == ()


def groups(jobs: Jobs) -> int:
    return sum(record.formed is not None for record in jobs.records("uv"))


def first_of(jobs: Jobs) -> int:
    """The id of the process that is rank 0."""
    records = jobs.records("uv")
    pids = {r.event.worker: r.event.pid for r in records if isinstance(r.event, WorkerReady)}
    return pids[next(r.formed.workers[0] for r in records if r.formed is not None)]
