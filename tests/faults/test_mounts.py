"""A mounted file system that hangs, fills up, turns read-only or loses the run's directory, while a run uses
it. The kernel's own errors, not ours.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from elastic_train.checkpoint.run_directory import RunDirectory
from elastic_train.cli.exit_codes import FINISHED, STOPPED
from elastic_train.control.events import WorkerLost
from elastic_train.observe.ledger import ledger
from elastic_train.storage.fsspec_store import open_store
from elastic_train.testing.ray_processes import RayProcesses
from elastic_train.testing.real_mount import RealMount, real_mount, why_not
from tests.cluster.conftest import Jobs, environment_of, eventually, small_job

pytestmark = [pytest.mark.ring4, pytest.mark.matrix, pytest.mark.timeout(900)]
ONE = ("--workers", "1:1", "--standby", "0", "--seconds-per-sample", "0.05")
STEPS = 60
TROUBLE_S = 25.0
"""Longer than a step, a save and a lease take together."""


@dataclass(frozen=True, kw_only=True)
class World:
    jobs: Jobs
    mount: RealMount
    logs: Path

    @contextmanager
    def driver(self, name: str, *options: str) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
        where = ("--address", self.jobs.cluster.address, "--storage", str(self.mount.path), "--name", name)
        environment = self.jobs.cluster.environment
        with small_job(environment, self.logs / f"{name}.log", *where, *ONE, *options) as driver:
            yield driver

    def saved(self, name: str) -> int:
        newest = RunDirectory(open_store(str(self.mount.path / name))).newest()
        return newest.step if newest is not None else 0


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    if reason := why_not():
        pytest.skip(reason)
    environment = environment_of(tmp_path_factory.mktemp("home"))
    with real_mount(64) as mount, RayProcesses(environment, head_cpus=2) as cluster:
        jobs = Jobs(cluster, mount.path, copied=False)
        yield World(jobs=jobs, mount=mount, logs=tmp_path_factory.mktemp("logs"))


def came_to(log: Path, step: int) -> bool:
    return any(int(found) >= step for found in re.findall(r"step (\d+)/", log.read_text()))


def trained_as_if_nothing_was(world: World, name: str) -> None:
    records = world.jobs.records(name)
    assert not [r for r in records if isinstance(r.event, WorkerLost)]
    assert not [r.reason for r in records if "without progress" in r.reason]
    book = ledger(records)
    assert sorted(book.losses) == list(range(1, STEPS + 1))
    assert book.superseded == ()
    assert world.saved(name) == STEPS
    assert not list((world.mount.path / name).rglob(".tmp-*"))


@pytest.mark.parametrize("trouble", ["hanging", "full", "read_only"])
def test_a_run_trains_through_trouble_of_its_mount_and_saves_after_it(world: World, trouble: str) -> None:
    with world.driver(trouble, "--max-steps", str(STEPS)) as (process, log):
        eventually("step 15", lambda: came_to(log, 15))
        with getattr(world.mount, trouble)():
            time.sleep(TROUBLE_S)
            assert process.poll() is None, log.read_text()
        assert process.wait(240.0) == FINISHED, log.read_text()
    trained_as_if_nothing_was(world, trouble)


@pytest.mark.parametrize("trouble", ["hanging", "full", "read_only"])
def test_a_stop_keeps_its_checkpoint_through_trouble_of_its_mount(world: World, trouble: str) -> None:
    """And the run goes on from there."""
    name = f"stop-{trouble}"
    with world.driver(name, "--max-steps", str(STEPS)) as (process, log):
        eventually("step 5", lambda: came_to(log, 5))
        with getattr(world.mount, trouble)():
            process.send_signal(signal.SIGINT)
            time.sleep(TROUBLE_S)
            assert process.poll() is None, log.read_text()
        assert process.wait(240.0) == STOPPED, log.read_text()
    assert world.saved(name) == max(ledger(world.jobs.records(name)).losses)
    with world.driver(name, "--max-steps", str(STEPS)) as (process, log):
        assert process.wait(240.0) == FINISHED, log.read_text()
    trained_as_if_nothing_was(world, name)


def test_a_run_whose_directory_is_moved_away_goes_on_in_it_when_it_is_back(world: World) -> None:
    """As it looks where a mount goes away: nothing is there, and nothing is written in its place."""
    root, away = world.mount.path / "moved", world.mount.path / "away"
    with world.driver("moved", "--max-steps", str(STEPS)) as (process, log):
        eventually("step 15", lambda: came_to(log, 15))
        root.rename(away)
        time.sleep(TROUBLE_S)
        assert not root.exists()
        assert process.poll() is None, log.read_text()
        away.rename(root)
        assert process.wait(240.0) == FINISHED, log.read_text()
    trained_as_if_nothing_was(world, "moved")


def test_a_run_whose_directory_is_deleted_says_so_and_can_be_ended(world: World) -> None:
    root = world.mount.path / "deleted"
    with world.driver("deleted", "--max-steps", "4000") as (process, log):
        eventually("step 15", lambda: came_to(log, 15))
        root.rename(world.mount.path / "trash")
        shutil.rmtree(world.mount.path / "trash")
        eventually("that it is gone", lambda: "storage failed" in log.read_text(), 240.0)
        process.send_signal(signal.SIGINT)
        time.sleep(1.0)
        process.send_signal(signal.SIGINT)
        assert process.wait(60.0) not in (FINISHED, None), log.read_text()
    print(log.read_text())
    assert "Traceback" not in log.read_text()
    eventually("the end of its processes", lambda: not world.jobs.left(), 60.0)
