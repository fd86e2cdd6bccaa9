"""A host that vanishes without a word: no reset, no refusal. Ray itself needs about a minute to notice."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.recovery.hole import ENVIRONMENT, cut_and_listen
from elastic_train.testing.hosts import Hosts, why_not

pytestmark = [pytest.mark.ring4, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
STEPS, CUT_AFTER = 100, 25
SOON_S = 30.0
"""Ray needs 60 s and more. How long it takes is measured by `benchmarks.recovery --case hole`."""


def test_a_host_that_is_cut_off_is_noticed_and_the_run_is_back_long_before_ray_knows(tmp_path: Path) -> None:
    """And its last checkpoint is durable long before Ray calls the node dead."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with Hosts(3, ENVIRONMENT) as hosts:
        program = str(ROOT / "tests/faults/black_hole_driver.py")
        command = (sys.executable, program, hosts.address, str(tmp_path), str(STEPS))
        heard = cut_and_listen(hosts, command, ENVIRONMENT, host=2, after=CUT_AFTER)
    print("\n".join(heard.others))
    assert heard.returncode == 0
    print(f"from the cut to the first step after it: {heard.back_at - heard.cut_at:.2f} s")
    print(f"from the last step to the end: {heard.ended_at - heard.last_at:.2f} s")
    assert heard.end["outcome"] == "finished"
    assert heard.end["superseded"] == 0, "the survivors hold every committed step"
    assert 0 < heard.back_at - heard.cut_at < SOON_S
    assert heard.ended_at - heard.last_at < SOON_S
