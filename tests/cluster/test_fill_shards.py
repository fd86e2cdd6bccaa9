"""A move to new shards takes those and a bounded buffer beside the old ones, measured by the kernel."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from elastic_train.cluster.worker.fill_shards import AHEAD, BATCH_BYTES

pytestmark = pytest.mark.ring2


def test_a_move_takes_twice_the_shard_at_most_and_a_bounded_buffer() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.cluster.filling_memory"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["grown"] >= 0.9 * found["state"], "the new shards are there beside the old ones"
    assert found["grown"] <= 1.05 * found["state"] + (AHEAD + 1) * BATCH_BYTES
    print(f"{found['grown'] / found['state']:.2f} of the shard beside the old one")
