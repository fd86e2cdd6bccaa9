"""Hosts that are not what people write programs on, by their networks or limits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.recovery.hole import ENVIRONMENT, cut_and_listen
from elastic_train.cli.exit_codes import USAGE
from elastic_train.cluster.process_room import WORKER
from elastic_train.testing.hosts import IPV6_ALONE, PLAIN, WRONG_FIRST, Hosts, Network, why_not
from tests.cluster.conftest import REPOSITORY, SMALL_JOB, environment_of
from tests.places.conftest import few_processes

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


def test_a_host_on_which_few_processes_may_begin_is_named(tmp_path: Path) -> None:
    """Ray itself comes up there."""
    if reason := why_not():
        pytest.skip(reason)
    with few_processes(10_000) as group, Hosts(2, ENVIRONMENT) as hosts:
        for pid in hosts.processes(1):
            (group / "cgroup.procs").write_text(str(pid))
        used = int((group / "pids.current").read_text())
        (group / "pids.max").write_text(str(used + WORKER // 2))
        where = ("--address", hosts.address, "--storage", str(tmp_path), "--name", "narrow")
        done = subprocess.run(
            hosts.inside(0, sys.executable, str(SMALL_JOB), *where, "--workers", "1:1"),
            env=environment_of(tmp_path),
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
    print(done.stdout, done.stderr)
    assert done.returncode == USAGE
    assert f"{PLAIN.of(1)} can't be used" in done.stderr
    assert "podPidsLimit" in done.stderr
