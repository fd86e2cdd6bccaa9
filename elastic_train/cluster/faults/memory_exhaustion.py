"""Have the kernel kill this process for memory, in a small control group."""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path

from elastic_train.control_groups import control_groups

ROOM = 256 * 2**20
LEAK = 0.965
"""Share of the room that is taken first, and held for longer than a heartbeat takes."""
HELD_S = 2.5


def why_not() -> str:
    """Why no process can be ended for memory here; empty if one can."""
    group = next(control_groups("memory"), None)
    if group is None:
        return "control groups of memory are not mounted"
    probe = group / f"et-probe-{os.getpid()}"
    try:
        probe.mkdir()
        probe.rmdir()
    except OSError as problem:
        return f"no control group can be made: {problem.strerror}"
    return ""


def exhaust() -> None:
    """Take memory until the kernel ends this process. It does not return."""
    parent = next(control_groups("memory"))
    group = parent / f"et-{os.getpid()}"
    group.mkdir()
    remove = f"while kill -0 {os.getpid()} 2>/dev/null; do sleep 0.2; done; sleep 0.2; rmdir {group}"
    subprocess.Popen(["sh", "-c", remove], start_new_session=True)
    _confine(group)
    taken = [b"\1" * int(LEAK * ROOM)]
    threading.Event().wait(HELD_S)
    while True:
        taken.append(b"\1" * 2**20)


def _confine(group: Path) -> None:
    first = group / "memory.limit_in_bytes"
    (first if first.exists() else group / "memory.max").write_text(str(ROOM))
    (group / "cgroup.procs").write_text(str(os.getpid()))
