"""A host that vanishes without a word: no reset, no refusal. Ray itself needs about a minute to notice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from elastic_train.testing.hosts import Hosts, why_not

pytestmark = [pytest.mark.ring4, pytest.mark.matrix, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
STEPS, CUT_AFTER = 100, 25
BACK_S, SAVED_S = 5.0, 20.0
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "RAY_AUTH_MODE": "disabled",
    "RAY_worker_niceness": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_raylet_start_wait_time_s": "180",
    "RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "1",
    "PYTHONPATH": str(ROOT),
}


def test_a_host_that_is_cut_off_is_noticed_and_the_run_is_back_within_five_seconds(tmp_path: Path) -> None:
    """And its last checkpoint is durable long before Ray calls the node dead."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    cut_at, cut_generation, back_at, last_at, ended_at, end = 0.0, 0, 0.0, 0.0, 0.0, {}
    with Hosts(3, ENVIRONMENT) as hosts:
        program = str(ROOT / "tests/faults/black_hole_driver.py")
        command = hosts.inside(0, sys.executable, program, hosts.address, str(tmp_path), str(STEPS))
        with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as driver:
            assert driver.stdout is not None
            for line in driver.stdout:
                word, _, rest = line.partition(" ")
                if word == "STEP":
                    step, generation, seconds = rest.split()
                    last_at = float(seconds)
                    if not cut_at and int(step) >= CUT_AFTER:
                        hosts.cut(2)
                        cut_at, cut_generation = time.time(), int(generation)
                    elif cut_at and not back_at and int(generation) > cut_generation:
                        back_at = float(seconds)
                elif word == "END":
                    ended_at, end = time.time(), json.loads(rest)
                else:
                    print(line, end="")
        assert driver.returncode == 0
    print(f"from the cut to the first step after it: {back_at - cut_at:.2f} s")
    print(f"from the last step to the end: {ended_at - last_at:.2f} s")
    assert end["outcome"] == "finished"
    assert end["superseded"] == 0, "the survivors hold every committed step"
    assert 0 < back_at - cut_at < BACK_S
    assert ended_at - last_at < SAVED_S
