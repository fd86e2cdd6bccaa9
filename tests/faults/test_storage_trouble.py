"""A real S3 server fails for a while, in every phase of a run: it refuses, its tokens end, it stands still.

What it keeps from a run is time. No machine is charged, nothing that was committed is lost.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from elastic_train.checkpoint.run_directory import RunDirectory
from elastic_train.cli.exit_codes import FINISHED, STOPPED
from elastic_train.control.events import StepCommitted, WorkerLost
from elastic_train.observe.journal_records import Record, from_json
from elastic_train.observe.ledger import ledger
from elastic_train.storage.fsspec_store import open_store
from elastic_train.storage.journal import read_journal
from elastic_train.testing.ray_processes import RayProcesses
from elastic_train.testing.s3_server import KEY, SECRET, S3Server, s3_server
from elastic_train.testing.troubled_front import Front, Trouble, troubled_front
from tests.cluster.conftest import environment_of, eventually, small_job

pytestmark = [pytest.mark.ring4, pytest.mark.matrix, pytest.mark.timeout(900)]
ONE = ("--workers", "1:1", "--standby", "0")
SHORT_S = 12.0
LONG_S = 75.0
"""Longer than one operation is tried again, so that the run itself has to wait."""
AWAY_S = 300.0
SLOW = ("--seconds-per-sample", "0.05")
FAST = ("--seconds-per-sample", "0.001")  # the same samples
PHASES = ("start", "step", "save", "restore", "stop")


@dataclass(frozen=True, kw_only=True)
class World:
    """A cluster whose processes reach the server through `front` alone."""

    cluster: RayProcesses
    server: S3Server
    front: Front
    bucket: str
    logs: Path

    @contextmanager
    def driver(self, name: str, *options: str) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
        where = ("--address", self.cluster.address, "--storage", self.bucket, "--name", name)
        with small_job(self.cluster.environment, self.logs / f"{name}.log", *where, *ONE, *options) as driver:
            yield driver

    def records(self, name: str) -> list[Record]:
        store = open_store(f"{self.bucket}/{name}", options=self.server.options)
        return [from_json(line) for _, part in read_journal(store) for line in part]

    def saved(self, name: str) -> int:
        newest = RunDirectory(open_store(f"{self.bucket}/{name}", options=self.server.options)).newest()
        return newest.step if newest is not None else 0

    def stand_still(self, seconds: float) -> None:
        """The server answers nobody, as a mount whose other end is gone."""
        os.kill(self.server.pid, signal.SIGSTOP)
        threading.Timer(seconds, os.kill, (self.server.pid, signal.SIGCONT)).start()

    def trouble(self, kind: Trouble | str, seconds: float, *, about: str = "") -> None:
        if kind == "stopped":
            self.stand_still(seconds)
        else:
            self.front.trouble_for(kind, seconds, about=about)  # pyright: ignore[reportArgumentType]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with (
        s3_server(tmp_path_factory.mktemp("s3")) as server,
        troubled_front(server.endpoint) as front,
    ):
        environment = environment_of(tmp_path_factory.mktemp("home")) | {
            "AWS_ENDPOINT_URL": front.endpoint,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        bucket = server.bucket("runs")
        with RayProcesses(environment, head_cpus=6) as cluster:
            logs = tmp_path_factory.mktemp("logs")
            yield World(cluster=cluster, server=server, front=front, bucket=bucket, logs=logs)


def nobody_was_charged(records: list[Record]) -> None:
    assert not [r for r in records if isinstance(r.event, WorkerLost)]
    assert not [r.reason for r in records if "without progress" in r.reason]


@pytest.mark.parametrize("kind", ["busy", "expired", "stopped"])
def test_a_run_starts_trains_and_saves_through_trouble(world: World, kind: str) -> None:
    """Before its first operation, in its steps, and in its saves."""
    name = f"through-{kind}"
    world.trouble(kind, SHORT_S)
    with world.driver(name, "--max-steps", "60", *SLOW) as (process, log):
        eventually("step 15", lambda: came_to(log, 15))
        world.trouble(kind, SHORT_S, about="checkpoints/")
        assert process.wait(240.0) == FINISHED, log.read_text()
    records = world.records(name)
    nobody_was_charged(records)
    book = ledger(records)
    assert sorted(book.losses) == list(range(1, 61))
    assert book.superseded == ()
    assert world.saved(name) == 60


@pytest.mark.parametrize("kind", ["busy", "stopped"])
def test_a_stop_waits_for_storage_and_a_restore_too(world: World, kind: str) -> None:
    """For longer than an operation is tried again."""
    name = f"stop-{kind}"
    with world.driver(name, "--max-steps", "60", *SLOW) as (process, log):
        eventually("step 5", lambda: came_to(log, 5))
        world.trouble(kind, LONG_S, about="checkpoints/")
        process.send_signal(signal.SIGINT)
        assert process.wait(300.0) == STOPPED, log.read_text()
    before = world.records(name)
    nobody_was_charged(before)
    last = max(r.event.step for r in before if isinstance(r.event, StepCommitted))
    assert world.saved(name) == last, "what was finished is kept"
    world.front.trouble_for("busy", LONG_S, about=f"checkpoints/step-{last:010d}")
    with world.driver(name, "--max-steps", "60", *FAST) as (process, log):
        assert process.wait(400.0) == FINISHED, log.read_text()
    after = world.records(name)
    nobody_was_charged(after)
    book = ledger(after)
    assert sorted(book.losses) == list(range(1, 61))
    assert book.superseded == ()


@pytest.mark.parametrize("kind", ["busy", "expired", "silent"])
def test_storage_may_be_away_for_five_minutes_in_each_phase(world: World, kind: Trouble) -> None:
    """Five runs side by side, each without what it keeps in storage for so long: a whole run's, or its
    checkpoints.
    """
    steps, front = dict.fromkeys(PHASES, 60) | {"step": 500}, world.front
    name = {phase: f"{kind}-in-{phase}" for phase in PHASES}

    def begin(phase: str, *speed: str) -> tuple[subprocess.Popen[bytes], Path]:
        options = ("--max-steps", str(steps[phase]), *speed)
        return entered.enter_context(world.driver(name[phase], *options))

    with ExitStack() as entered:
        first, log = begin("restore", *SLOW)
        eventually("step 5", lambda: came_to(log, 5))
        first.send_signal(signal.SIGINT)
        assert first.wait(120.0) == STOPPED, log.read_text()
        front.trouble_for(kind, AWAY_S, about=f"{name['start']}/")
        front.trouble_for(kind, AWAY_S, about=f"{name['save']}/checkpoints/")
        front.trouble_for(kind, AWAY_S, about=f"{name['restore']}/checkpoints/step-")
        drivers = {phase: begin(phase, *(FAST if phase == "restore" else SLOW)) for phase in PHASES}
        for phase in ("step", "stop"):
            eventually("step 5", lambda phase=phase: came_to(drivers[phase][1], 5))
            front.trouble_for(kind, AWAY_S, about=f"{name[phase]}/")
        drivers["stop"][0].send_signal(signal.SIGINT)
        ends = {phase: process.wait(AWAY_S + 400.0) for phase, (process, _) in drivers.items()}
    said = {phase: log.read_text() for phase, (_, log) in drivers.items()}
    assert ends == dict.fromkeys(PHASES, FINISHED) | {"stop": STOPPED}, said
    for phase in PHASES:
        records = world.records(name[phase])
        nobody_was_charged(records)
        last = max(r.event.step for r in records if isinstance(r.event, StepCommitted))
        assert last == steps[phase] or phase == "stop"
        assert world.saved(name[phase]) == last, phase
        book = ledger(records)
        assert sorted(book.losses) == list(range(1, last + 1)), phase
        assert book.superseded == (), phase


def came_to(log: Path, step: int) -> bool:
    return any(int(found) >= step for found in re.findall(r"step (\d+)/", log.read_text()))
