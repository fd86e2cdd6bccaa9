"""A cluster that asks for a token: a submitted job inherits it, and all its processes have it."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import pytest

from elastic_train.testing.ray_processes import RayProcesses
from tests.cluster.conftest import BIN, Jobs, assert_starting, eventually

pytestmark = [pytest.mark.ring3, pytest.mark.matrix, pytest.mark.timeout(400)]


def test_a_job_runs_on_a_cluster_that_asks_for_a_token_and_nobody_without_one_gets_in(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    open_to_all = {
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "HOME": str(tmp_path / "home"),
        "RAY_worker_niceness": "0",
        "OMP_NUM_THREADS": "1",
        "RAY_AUTH_MODE": "disabled",
    }
    asked = open_to_all | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    with RayProcesses(asked, head_cpus=2) as cluster:
        jobs = Jobs(cluster, tmp_path / "runs")
        command = ("python", "tests/cluster/small_job.py", "--max-steps", "6", "--storage", str(jobs.storage))

        def taken() -> str | None:  # a cluster that has just been started takes no jobs yet
            done = jobs.cli("submit", "--working-dir", ".", "--", *command, "--standby", "0")
            said = done.stdout + done.stderr
            if done.returncode != 0:
                assert_starting(said)
            return said if done.returncode == 0 else None

        assert "step 6/6" in eventually("an agent that takes jobs", taken)
        assert sorted(jobs.ledger("small").losses) == list(range(1, 7))
        cluster.environment = open_to_all
        refused = jobs.cli("submit", "--working-dir", ".", "--", *command)
        assert refused.returncode != 0
        assert "token" in (refused.stdout + refused.stderr).lower()
