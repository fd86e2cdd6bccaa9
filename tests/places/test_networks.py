"""Hosts whose network is not what people write programs on: a run trains there, and a host that is cut off
costs no step.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.recovery.hole import ENVIRONMENT, cut_and_listen
from elastic_train.testing.hosts import IPV6_ALONE, WRONG_FIRST, Hosts, Network, why_not
from tests.cluster.conftest import REPOSITORY

pytestmark = [pytest.mark.ring4, pytest.mark.matrix, pytest.mark.timeout(500)]
STEPS, CUT_AFTER = 60, 20


@pytest.mark.parametrize(
    "network",
    [
        pytest.param(IPV6_ALONE, id="IPv6 alone"),
        pytest.param(WRONG_FIRST, id="an interface first that leads nowhere"),
    ],
)
def test_a_run_trains_and_loses_a_host_without_a_step(network: Network, tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    with Hosts(3, ENVIRONMENT, network) as hosts:
        program = str(REPOSITORY / "tests/faults/black_hole_driver.py")
        command = (sys.executable, program, hosts.address, str(tmp_path), str(STEPS))
        heard = cut_and_listen(hosts, command, ENVIRONMENT, host=2, after=CUT_AFTER)
    print("\n".join(heard.others))
    assert heard.returncode == 0
    assert heard.end == {"outcome": "finished", "superseded": 0}
