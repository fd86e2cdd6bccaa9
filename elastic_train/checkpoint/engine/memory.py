"""How much memory there is and how much of it is used: of the machine, or of what bounds this process."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path

from elastic_train.planner.plan import bytes_text

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_STATM = Path("/proc/self/statm")
SHORT = 0.05
"""Share of memory below which what is free counts as nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes: what a process holds, and what is used of what there is where it runs."""

    held: int
    used: int
    room: int

    @property
    def short(self) -> bool:
        return self.room - self.used < SHORT * self.room

    def __str__(self) -> str:
        where = f"{bytes_text(self.used)} of {bytes_text(self.room)} were used where it ran"
        return f"it held {bytes_text(self.held)}, and {where}"


def free_memory() -> int:
    """Bytes that this process may still take: of the machine, or of its control group if that has less."""
    free = _machine()["MemAvailable"]
    limit, used = _CGROUP / "memory.max", _CGROUP / "memory.current"
    if limit.exists() and (most := limit.read_text().strip()) != "max":
        free = min(free, int(most) - int(used.read_text()))
    return max(free, 0)


def memory_now() -> Memory:
    """Of this process, in the tightest of its bounds: the machine, its control group, its address space."""
    size, held = (int(pages) * os.sysconf("SC_PAGE_SIZE") for pages in _STATM.read_text().split()[:2])
    machine = _machine()
    bounds = [(machine["MemTotal"] - machine["MemAvailable"], machine["MemTotal"])]
    limit = _CGROUP / "memory.max"
    if limit.exists() and (most := limit.read_text().strip()) != "max":
        stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        cached = int(stat["file"]) - int(stat["shmem"])  # what the kernel gives back
        bounds.append((int((_CGROUP / "memory.current").read_text()) - cached, int(most)))
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if space != resource.RLIM_INFINITY:
        bounds.append((size, space))
    used, room = min(bounds, key=lambda bound: bound[1] - bound[0])
    return Memory(held=held, used=used, room=room)


def _machine() -> dict[str, int]:
    lines = (line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
    return {name: int(value.split()[0]) * 1024 for name, value in lines}
