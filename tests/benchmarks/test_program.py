"""A measuring program's result, and what becomes of one that has none."""

from __future__ import annotations

import sys
import time

import psutil
import pytest

from benchmarks.program import measured

pytestmark = pytest.mark.ring1

WRITES = """
import json, pathlib, sys
pathlib.Path(sys.argv[-1]).write_text(json.dumps([1, 2]))
"""
SILENT = "print('nothing to say')"
HANGS = """
import json, os, pathlib, subprocess, sys, time
child = subprocess.Popen(["sleep", "600"])
new = pathlib.Path(sys.argv[-1] + ".new")  # somebody may be looking
new.write_text(json.dumps({"child": child.pid, "goodput": 0.25}))
os.replace(new, sys.argv[-1])
time.sleep(600)
"""


def test_a_program_gives_what_it_wrote() -> None:
    assert measured([sys.executable, "-c", WRITES], 200.0) == [1, 2]


def test_a_program_that_wrote_nothing_is_a_problem_with_its_last_words() -> None:
    found = measured([sys.executable, "-c", SILENT], 200.0)
    assert found == {"problem": "exit code 0: nothing to say\n"}


def test_a_program_that_is_never_over_is_ended_with_all_that_it_started() -> None:
    for limit_s in (1.0, 10.0, 100.0):  # the second where the machine was too slow for it to begin
        found = measured([sys.executable, "-c", HANGS], limit_s)
        assert f"not over after {limit_s:.0f} s" in found["problem"]
        if "child" in found:
            break
    assert found["goodput"] == 0.25
    while not ended(found["child"]):
        time.sleep(0.02)


def ended(pid: int) -> bool:
    """It may be left for whoever inherits it to be taken note of."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
