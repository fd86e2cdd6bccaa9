"""A move takes memory for what moves and a bounded buffer, none for what stays: measured by the kernel."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from elastic_train.cluster.worker.fill_shards import AHEAD, BATCH_BYTES

pytestmark = pytest.mark.ring2


def test_a_move_takes_memory_for_what_moves_and_a_bounded_buffer() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.cluster.filling_memory"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert 0 < found["moved"] < found["state"]
    assert found["grown"] >= 0.9 * found["moved"], "what was given is there beside the old shards"
    assert found["grown"] <= 1.05 * found["moved"] + (AHEAD + 1) * BATCH_BYTES
    print(f"{found['grown'] / found['state']:.2f} of the shard beside the old one")
