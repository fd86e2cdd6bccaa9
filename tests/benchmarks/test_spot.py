"""The spot benchmark's arithmetic: the scaled trace, and the account of the peer's notes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.peers.ray_train_spot import account
from benchmarks.spot.__main__ import measured
from benchmarks.spot.trace import scaled

pytestmark = pytest.mark.ring1


def test_a_trace_keeps_its_shape_at_a_smaller_scale(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("time_s,delta,total\n100,32,32\n200,-1,31\n300,-16,15\n500,17,32\n")
    small = scaled(trace, nodes=6, seconds=80.0)
    assert [c.nodes for c in small] == [6, 3, 6], "31 of 32 are still 6 of 6"
    assert [c.at_s for c in small] == pytest.approx([0.0, 30.0, 60.0])


def test_a_trace_never_takes_the_last_node(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("time_s,delta,total\n0,32,32\n10,-32,0\n")
    assert [c.nodes for c in scaled(trace, nodes=4, seconds=10.0)] == [4, 1]


def test_a_step_of_the_peer_counts_once_with_its_first_execution() -> None:
    notes = [
        {"kind": "ready", "step": 0, "at": 10.0, "pid": 1},
        {"kind": "step", "step": 1, "at": 11.0, "pid": 1},
        {"kind": "step", "step": 2, "at": 13.0, "pid": 1},
        {"kind": "ready", "step": 1, "at": 20.0, "pid": 2},  # killed, and restored from step 1
        {"kind": "step", "step": 2, "at": 25.0, "pid": 2},
        {"kind": "step", "step": 3, "at": 26.0, "pid": 2},
    ]
    found = account(notes, 40.0)
    assert found["good_s"] == pytest.approx(1.0 + 2.0 + 1.0)
    assert found["goodput"] == pytest.approx(4.0 / 40.0)
    assert (found["steps"], found["steps_redone"], found["groups"]) == (3, 1, 2)


FAILS = """
import json, os, pathlib, sys
new = pathlib.Path(sys.argv[-1] + ".new")  # somebody may be looking
new.write_text(json.dumps({"progress": "10 s: step 4", "goodput": 0.5}))
os.replace(new, sys.argv[-1])
print("a node vanished")
sys.exit(3)
"""


def test_what_a_program_knew_when_it_failed_is_its_row(capsys: pytest.CaptureFixture[str]) -> None:
    row = measured("ray_train", [sys.executable, "-c", FAILS], 200.0)
    assert row["goodput"] == 0.5
    assert row["problem"].startswith("exit code 3")
    assert "a node vanished" in row["problem"]
    assert "10 s: step 4" in capsys.readouterr().out
