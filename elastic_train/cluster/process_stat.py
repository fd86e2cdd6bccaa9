"""What the kernel says of a process of this machine."""

from __future__ import annotations

from pathlib import Path

STATE, USER_TICKS, SYSTEM_TICKS, THREADS, BEGAN = 0, 11, 12, 17, 19
"""Places among the fields of /proc/PID/stat behind the process's name; see proc(5)."""


def stat_fields(pid: int, *, proc: Path = Path("/proc")) -> list[str]:
    """The fields behind the name, which may have blanks. OSError where there is no such process."""
    return (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
