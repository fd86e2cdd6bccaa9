"""`status` of a run whose controller may be gone: from storage alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from elastic_train.cli.status import show_status
from elastic_train.control.events import StopRequested
from elastic_train.observe.journal_records import Record, to_json, wall_text
from elastic_train.storage.fsspec_store import open_store
from elastic_train.storage.journal import Journal
from elastic_train.storage.lease import Lease
from tests.cli.conftest import renewing

pytestmark = pytest.mark.ring1
LONG_AGO, TO_COME = wall_text(0.0), wall_text(32e9)


@pytest.fixture(params=[LONG_AGO, TO_COME], ids=["long ago", "to come"])
def wall(request: pytest.FixtureRequest) -> str:
    """What the last record says of its time: the controller's clock may be ahead of this one."""
    return request.param


@pytest.fixture
def lease(tmp_path: Path, wall: str) -> Lease:
    """Of a run whose journal says nothing for long."""
    store = open_store(str(tmp_path))
    event = StopRequested(at=0.0, reason="asked")
    journal = Journal(store, 1)
    journal.append(to_json(Record(seq=0, wall=wall, event=event, reason="growing", phase="running")))
    journal.flush()
    held = Lease(store, holder="pid 7 on a head", lease_s=0.1)
    held.acquire()
    return held


def test_a_run_that_nobody_drives_any_more_is_stale(
    lease: Lease, wall: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    show_status(str(tmp_path), as_json=False, watch_s=0.2)
    assert f"stale since {wall}" in capsys.readouterr().out
    show_status(str(tmp_path), as_json=True, watch_s=0.2)
    assert json.loads(capsys.readouterr().out)["stale"] is True


def test_a_run_that_is_only_silent_is_held(
    lease: Lease, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with renewing(lease):
        show_status(str(tmp_path), as_json=False, watch_s=100.0)
    said = capsys.readouterr().out
    assert "held by pid 7 on a head" in said
    assert "stale" not in said
    lease.release()
    show_status(str(tmp_path), as_json=True, watch_s=100.0)
    assert json.loads(capsys.readouterr().out)["stale"] is False
