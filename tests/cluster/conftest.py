"""A real Ray cluster to which jobs are submitted, as a person would."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
from ray.job_submission import JobSubmissionClient

from elastic_train.cluster.peer_store.segments import DIRECTORY, PREFIX
from elastic_train.observe.journal_records import Record, from_json
from elastic_train.observe.ledger import Ledger, ledger
from elastic_train.storage.fsspec_store import open_store
from elastic_train.storage.journal import read_journal
from elastic_train.testing.ray_processes import RayProcesses, commands_below

REPOSITORY = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
SMALL_JOB = REPOSITORY / "tests/cluster/small_job.py"
OURS = ("ray::Controller", "ray::Worker", "ray::Rendezvous", "ray::PeerStore")
T = TypeVar("T")


def eventually(what: str, ask: Callable[[], T], seconds: float = 300.0) -> T:
    """The first truth that `ask` tells."""
    deadline = time.monotonic() + seconds
    while not (found := ask()):
        assert time.monotonic() < deadline, f"{what}: not within {seconds:.0f} s"
        time.sleep(0.2)
    return found


def segments_of(*runs: str) -> list[str]:
    """The shared memory of runs of these names, and of no others on the machine."""
    return [path.name for run in runs for path in DIRECTORY.glob(f"{PREFIX}{run}-*")]


def environment_of(home: Path) -> dict[str, str]:
    """Of the processes of a cluster and of those who use it from this machine."""
    return {
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "HOME": str(home),
        "PYTHONPATH": str(REPOSITORY),
        "RAY_AUTH_MODE": "disabled",
        "RAY_worker_niceness": "0",
        "OMP_NUM_THREADS": "1",
        # Ray gives a node 30 s, and a head that answers 5 s: too little where tests run side by side.
        "RAY_raylet_start_wait_time_s": "180",
        "RAY_gcs_rpc_server_connect_timeout_s": "60",
    }


@contextmanager
def small_job(
    environment: Mapping[str, str], log: Path, *options: str
) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """The driver of the small job in a terminal of its own, and what it and those before it printed."""
    with log.open("ab") as out:
        process = subprocess.Popen(
            [sys.executable, "-u", str(SMALL_JOB), *options],
            env=environment,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield process, log
        finally:
            process.kill()
            process.wait()


def assert_starting(text: str) -> None:
    assert "No available agent" in text, text


@dataclass
class Jobs:
    """Submits jobs and looks at what became of them."""

    cluster: RayProcesses
    storage: Path
    copied: bool = True  # the working directory is sent along; not where nodes share one directory

    def cli(self, *arguments: str, timeout: float = 300.0) -> subprocess.CompletedProcess[str]:
        """`ray job ...`, in the repository."""
        verb, *rest = arguments
        command = [str(BIN / "ray"), "job", verb, "--address", self.cluster.jobs, *rest]
        return subprocess.run(
            command,
            cwd=REPOSITORY,
            env=self.cluster.environment,
            text=True,
            capture_output=True,
            timeout=timeout,
        )

    @property
    def client(self) -> JobSubmissionClient:
        return JobSubmissionClient(self.cluster.jobs)

    def submit(self, key: str, *options: str, stop_wait_s: int | None = None) -> str:
        """Submit the small job under a submission id and return at once."""
        file = "tests/cluster/small_job.py" if self.copied else str(REPOSITORY / "tests/cluster/small_job.py")
        command = shlex.join(("python", file, "--storage", str(self.storage), *options))
        environment: dict[str, Any] = {"working_dir": str(REPOSITORY)} if self.copied else {}
        if stop_wait_s is not None:
            environment["env_vars"] = {"RAY_JOB_STOP_WAIT_TIME_S": str(stop_wait_s)}

        def accepted() -> bool:  # a cluster that has just been started takes no jobs yet
            try:
                self.client.submit_job(entrypoint=command, submission_id=key, runtime_env=environment)
            except (RuntimeError, OSError) as error:
                text = str(error)
                if "already exists" not in text and isinstance(error, RuntimeError):
                    assert_starting(text)
                return "already exists" in text
            return True

        eventually("an agent that takes jobs", accepted)
        return key

    def log(self, key: str) -> str:
        return self.client.get_job_logs(key)

    def end(self, key: str) -> str:
        """How a job ended."""

        def status() -> str | None:
            found = self.client.get_job_status(key)
            return found.value if found.is_terminal() else None

        return eventually(f"the end of {key}", status)

    def code(self, key: str) -> int:
        """The exit code of a job's driver."""
        self.end(key)
        info = self.client.get_job_info(key)
        assert info.driver_exit_code is not None, f"{info.status}: {info.message}\n{self.log(key)}"
        return info.driver_exit_code

    def records(self, name: str) -> list[Record]:
        store = open_store(str(self.storage / name))
        return [from_json(line) for _, part in read_journal(store) for line in part]

    def ledger(self, name: str) -> Ledger:
        return ledger(self.records(name))

    def reached(self, name: str, step: int) -> bool:
        """Whether the journal knows a step. It becomes durable within seconds."""
        return bool(self.ledger(name).losses.keys() & {step})

    def left(self) -> list[str]:
        """Processes of runs that are there still."""
        assert self.cluster.head is not None
        titles = [" ".join(command) for command in commands_below(self.cluster.head).values()]
        return [title for title in titles if title.startswith(OURS)]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    environment = environment_of(tmp_path_factory.mktemp("home"))
    del environment["PYTHONPATH"]  # a job brings the package along
    with RayProcesses(environment, head_cpus=2) as cluster:
        yield Jobs(cluster, tmp_path_factory.mktemp("runs"))
