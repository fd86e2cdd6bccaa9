"""What the stall benchmark makes of its readings."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.stall.__main__ import NAMES, Rank, headline, run
from benchmarks.stall.peers import PEERS
from benchmarks.stall.plot import plot

pytestmark = pytest.mark.ring0


def reading(system: str, blocked: float, **more: Any) -> dict[str, Any]:
    about = {"system": system, "every": 1, "workers": 1, "saves": 10, "skipped": 0, "torn": False}
    return {
        **about,
        "blocked_ms": blocked,
        "step_ms": 100.0,
        "ratio": 1.1,
        "x_copy": 1.5,
        "memory_mb": 800.0,
        **more,
    }


READINGS = [
    reading("none", 0.0, saves=0, torn=None, ratio=1.0),
    *(reading("ours (peer)", ms) for ms in (0.4, 0.5, 9.0)),
    reading("DCP save", 500.0),
    reading("DCP async_save (thread)", 60.0),
    reading("DCP async_save (DefaultStager)", 1.0, torn=True),
    {"system": "DCP async_save (process)", "every": 1, "workers": 1, "absent": "no room"},
]


def test_medians_count_and_a_peer_that_tears_is_no_rival() -> None:
    assert headline(READINGS) == {
        "blocked_ms": 0.5,
        "x_vs_dcp_sync": 1000.0,
        "x_vs_best_correct_async": 120.0,
        "step_overhead_ratio": 1.1,
        "x_copy_at_memory_speed": 1.5,
        "memory_mb": 800.0,
        "torn_peers": 1.0,
    }


def test_without_readings_nothing_is_claimed() -> None:
    absent = [{"system": name, "every": 1, "workers": 1, "absent": "gone"} for name in NAMES]
    assert set(headline(absent).values()) == {None}


def test_the_plot_shows_every_system_that_saved_and_marks_what_tore() -> None:
    drawn = ElementTree.fromstring(plot(READINGS))
    texts = [node.text or "" for node in drawn.iter() if node.tag.endswith("text")]
    assert sum(", 1 x, every 1" in text for text in texts) == 4
    assert any(text.endswith("torn") for text in texts)


def test_a_correct_system_of_another_package_is_a_rival_and_one_that_tears_is_not() -> None:
    more = [reading("DLRover flash (memory)", 5.0), reading("torch_checkpointing (no lock)", 0.2, torn=True)]
    said = headline([*READINGS, *more])
    assert (said["x_vs_best_correct_async"], said["torn_peers"]) == (10.0, 2.0)


def test_a_system_that_is_not_installed_is_absent_and_how_to_get_it_is_said(tmp_path: Path) -> None:
    for name in PEERS:
        found = run(name, every=1, workers=1, millions=1, steps=1, peers=tmp_path / "python")
        assert "make bench-peers" in found["absent"]


def test_what_a_system_leaves_running_holds_nobody_up_and_is_ended(tmp_path: Path) -> None:
    child = "import sys, time; print(1, flush=True); time.sleep(600)"
    code = (
        "import subprocess, sys; "
        f"left = subprocess.Popen([sys.executable, '-c', {child!r}], stdout=subprocess.PIPE); "
        "left.stdout.readline(); print('RESULT', '{\"left\": %d}' % left.pid)"
    )
    found, _ = Rank([sys.executable, "-c", code], {}, tmp_path / "rank0").reported()
    assert found is not None
    while is_running(found["left"]):
        threading.Event().wait(0.02)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_system_that_fails_says_why(tmp_path: Path) -> None:
    found, why = Rank(
        [sys.executable, "-c", "raise SystemExit('no room')"], {}, tmp_path / "rank0"
    ).reported()
    assert (found, why) == (None, "no room")
