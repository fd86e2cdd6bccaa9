"""Wall clocks that jump, and machines whose clocks differ: nothing of a run goes by them.

`LIBFAKETIME` names the library of that name where it isn't in its usual place.
"""

from __future__ import annotations

import os
import re
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import pytest

from elastic_train.cli.exit_codes import FINISHED
from elastic_train.control.events import WorkerLost
from elastic_train.testing.ray_processes import RayProcesses
from tests.cluster.conftest import Jobs, environment_of, eventually, small_job

pytestmark = [pytest.mark.ring4, pytest.mark.matrix, pytest.mark.timeout(900)]
USUAL = "/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1"


class WallClock:
    """What processes with its environment take for the wall clock. Their monotonic clocks are everybody's."""

    def __init__(self, file: Path, *, ahead_s: int = 0) -> None:
        self._file = file
        self.ahead(ahead_s)

    def ahead(self, seconds: int) -> None:
        new = self._file.with_suffix(".new")
        new.write_text(f"{seconds:+d}s\n")
        new.replace(self._file)

    def environment(self, library: str) -> dict[str, str]:
        return {
            "LD_PRELOAD": library,
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_CACHE_DURATION": "1",
            "DONT_FAKE_MONOTONIC": "1",
            "FAKETIME_DONT_RESET": "1",
        }


@pytest.fixture
def library() -> str:
    found = os.environ.get("LIBFAKETIME", USUAL)
    if not Path(found).exists():
        pytest.skip(f"{found} is not there: LIBFAKETIME may name another place")
    return found


def test_a_run_heeds_no_wall_clock(library: str, tmp_path: Path) -> None:
    """The driver's and the controller's machine jumps ten minutes ahead and back, and an hour back and ahead;
    of the two machines with workers one is a minute ahead, and one a minute behind.
    """
    here = WallClock(tmp_path / "here")
    ahead = WallClock(tmp_path / "ahead", ahead_s=60)
    behind = WallClock(tmp_path / "behind", ahead_s=-60)
    common = environment_of(tmp_path / "home")
    with RayProcesses(common | here.environment(library)) as cluster:
        jobs = Jobs(cluster, tmp_path, copied=False)
        for clock in (ahead, behind):
            cluster.environment = common | clock.environment(library)
            cluster.add_node(1)
        environment = common | here.environment(library)
        where = ("--address", cluster.address, "--storage", str(tmp_path), "--name", "jumps")
        options = ("--workers", "2:2", "--standby", "0", "--max-steps", "120", "--seconds-per-sample", "0.05")
        with small_job(environment, tmp_path / "jumps.log", *where, *options) as (process, log):
            for step, jump_s in ((8, 600), (30, 0), (50, -3600), (75, 0)):
                eventually(f"step {step}", lambda step=step: came_to(log, step) or process.poll() is not None)
                assert process.poll() is None, log.read_text()
                here.ahead(jump_s)
            assert process.wait(300.0) == FINISHED, log.read_text()
        records = jobs.records("jumps")
    assert not [r.reason for r in records if isinstance(r.event, WorkerLost)]
    assert not [r.reason for r in records if "stood still" in r.reason]
    assert sum(r.formed is not None for r in records) == 1, "nobody left the group"
    walls = [datetime.fromisoformat(r.wall).timestamp() for r in records]
    assert max(b - a for a, b in pairwise(walls)) > 500.0, "the clock jumped"
    book = jobs.ledger("jumps")
    assert sorted(book.losses) == list(range(1, 121))
    assert book.superseded == ()


def came_to(log: Path, step: int) -> bool:
    return any(int(found) >= step for found in re.findall(r"step (\d+)/", log.read_text()))
