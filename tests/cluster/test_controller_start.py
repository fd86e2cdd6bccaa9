"""A controller that fails before it owns anything tells its driver so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ring1

PROGRAM = """
import sys
from elastic_train.cluster.controller.controller import Controller
from elastic_train.config import Batch, RunSpec, Timing

spec = RunSpec(name="run", storage_path=sys.argv[1], batch=Batch(global_size=4, micro_size=1), max_steps=9,
               min_workers=1, max_workers=1, timing=Timing(lease_s=600.0))
controller = Controller(run="run", spec=spec, job=b"", planner=None, environment={}, driver="a test")
update = controller.updates(0, 0, 60.0)
print("ENDED", update.ended.outcome, update.ended.detail.splitlines()[-1])
"""


def test_a_controller_that_fails_in_its_first_line_ends_the_run_with_the_reason(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        env={"RAY_ENABLE_AUTO_CONNECT": "0", "PYTHONPATH": ":".join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert "ENDED infrastructure" in done.stdout, done.stderr
    assert "only available" in done.stdout, "it is no actor"
