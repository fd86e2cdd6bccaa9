"""A container's 64 MB of /dev/shm: snapshots do not fit, the run says so and trains all the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_train.checkpoint.run_directory import RunDirectory
from elastic_train.storage.fsspec_store import open_store

pytestmark = [pytest.mark.ring4, pytest.mark.matrix, pytest.mark.timeout(400)]
ROOT = Path(__file__).parents[2]
SMALL = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"', "-")
STEPS = 4


def possible() -> bool:
    try:
        return subprocess.run([*SMALL, "true"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


@pytest.mark.skipif(not possible(), reason="no mount of one's own here")
def test_a_run_trains_and_saves_with_64_mb_of_shared_memory(tmp_path: Path) -> None:
    job = [sys.executable, "jobs/pretrain_lm.py", "--size", "small", "--max-steps", str(STEPS)]
    where = ["--storage", str(tmp_path), "--name", "small", "--workers", "2:2", "--local-nodes", "2"]
    done = subprocess.run(
        [*SMALL, *job, *where, "--verbose"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "RAY_ADDRESS": "local"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    newest = RunDirectory(open_store(str(tmp_path / "small"))).newest()
    assert newest is not None
    assert newest.step == STEPS
