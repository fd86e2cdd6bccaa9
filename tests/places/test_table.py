"""The table of odd machines: each row of the page is a test, and each test here is a row."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.ring0
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "clusters.md"
FEW = "test_a_machine_on_which_few_processes_may_begin_is_refused_and_trains_with_enough"
OF_A_USER = "test_a_user_who_may_have_few_processes_is_told_what_raises_it_and_trains_with_enough"
MACHINES = "tests/places/test_machines.py", "test_a_run_trains_on_an_odd_machine"
NETWORKS = "tests/places/test_networks.py", "test_a_run_trains_and_loses_a_host_without_a_step"
ROWS = {
    "64 MB of": ("tests/faults/test_small_shm.py", "test_a_run_trains_and_saves_with_64_mb_of_shared_memory"),
    "a read-only root": MACHINES,
    "`/tmp` can't be written": (
        "tests/places/test_machines.py",
        "test_a_machine_whose_tmp_cannot_be_written_is_told_what_to_mount",
    ),
    "256 open files": MACHINES,
    "100 processes and threads in its control group": ("tests/places/test_machines.py", FEW),
    "100 processes and threads for a user": ("tests/places/test_machines.py", OF_A_USER),
    "hosts that have IPv6 alone": NETWORKS,
    "an interface first that leads nowhere": NETWORKS,
    "a host name that nothing resolves": MACHINES,
    "another user's `/tmp/ray`": MACHINES,
    "the clock of one node": (
        "tests/places/test_clocks.py",
        "test_the_clock_of_one_node_is_a_minute_ahead",
    ),
    "the clock is set while": ("tests/places/test_clocks.py", "test_a_clock_that_is_set_under_a_run"),
    "others' plain tasks": (
        "tests/faults/test_shared_cluster.py",
        "test_room_that_plain_tasks_hold_is_waited_for_and_they_are_named",
    ),
}


def named_in(file: Path) -> set[str]:
    named = (node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef))
    return {name for name in named if name.startswith("test_")}


def test_each_row_of_the_page_is_a_test_and_each_test_here_is_a_row() -> None:
    section = PAGE.read_text().partition("## Odd machines")[2].partition("\n## ")[0]
    rows = [row for row in re.findall(r"^\| (.+?) \|", section, re.MULTILINE) if row != "the machine"]
    assert len(rows) == len(ROWS)
    for row, begin in zip(rows, ROWS, strict=True):
        assert row.startswith(begin)
    for file, test in ROWS.values():
        assert test in named_in(ROOT / file), file
    here = {
        test
        for file in Path(__file__).parent.glob("test_*.py")
        if file != Path(__file__)
        for test in named_in(file)
    }
    assert here <= {test for _, test in ROWS.values()}
