"""Odd machines, made on this one of namespaces and limits, and the small job on them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from elastic_train.checkpoint.run_directory import RunDirectory
from elastic_train.control_groups import control_groups
from elastic_train.storage.fsspec_store import open_store
from tests.cluster.conftest import REPOSITORY, SMALL_JOB, environment_of

STEPS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """`made_by` is shell that makes the machine what it is, in new `spaces` of unshare. `$STORAGE` is where
    the run is kept, and stays writable.
    """

    name: str
    made_by: str
    spaces: tuple[str, ...] = ()

    def command(self, *command: str) -> list[str]:
        entered = ["unshare", *self.spaces] if self.spaces else []
        return [*entered, "sh", "-ec", f'{self.made_by}\nexec "$@"', "-", *command]

    def why_not(self, storage: Path) -> str:
        """Why it can't be made here; "" where it can."""
        try:
            tried = subprocess.run(
                self.command("true"),
                env=os.environ | {"STORAGE": str(storage)},
                capture_output=True,
                text=True,
                check=False,
                timeout=60,
            )
        except OSError as error:
            return f"{self.name}: {error}"
        return f"{self.name}: {tried.stderr.strip()}" if tried.returncode else ""


@contextmanager
def few_processes(most: int) -> Iterator[Path]:
    """A control group in which so many processes and threads may be, as a container's. Skips where there can
    be none. What is left in it is ended.
    """
    around = next(control_groups("pids"), None)
    if around is None:
        pytest.skip("no control group bounds processes here")
    group = around / f"et-{os.getpid()}"
    try:
        group.mkdir()
        (group / "pids.max").write_text(str(most))
    except OSError as error:
        pytest.skip(f"no control group for processes can be made here: {error}")
    try:
        yield group
    finally:
        left = [psutil.Process(int(pid)) for pid in (group / "cgroup.procs").read_text().split()]
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=10)
        group.rmdir()


def run_small_job(place: Place, storage: Path) -> subprocess.CompletedProcess[str]:
    """The small job on a local cluster of two nodes, from its start to its end, in a place."""
    job = [sys.executable, str(SMALL_JOB), "--max-steps", str(STEPS), "--workers", "2:2", "--standby", "0"]
    where = ["--storage", str(storage), "--name", "small", "--local-nodes", "2"]
    done = subprocess.run(
        place.command(*job, *where),
        cwd=REPOSITORY,
        env=environment_of(storage) | {"STORAGE": str(storage), "RAY_ADDRESS": "local"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    print(done.stdout, done.stderr)
    return done


def saved(storage: Path, name: str = "small") -> int:
    """The step of a run's newest checkpoint."""
    newest = RunDirectory(open_store(str(storage / name))).newest()
    return newest.step if newest is not None else 0
