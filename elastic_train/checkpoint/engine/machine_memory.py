"""How much memory there is and how much of it is used: of the machine, or of what bounds this process."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path

from elastic_train.control_groups import control_groups
from elastic_train.planner.plan import bytes_text

_MEMINFO = Path("/proc/meminfo")
_PROCESS = Path("/proc/self")
UNLIMITED = 2**60  # the first version of control groups says so with a number
SHORT = 0.05
"""Share of memory below which what is free counts as nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineMemory:
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
    free = [_machine()["MemAvailable"], *(room - used for used, room in _bounds())]
    return max(min(free), 0)


def memory_room() -> int:
    """Bytes that there are, used or not: of the machine, or of what bounds this process if that is less."""
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    rooms = [_machine()["MemTotal"], *(room for _, room in _bounds())]
    return min(rooms if space == resource.RLIM_INFINITY else [*rooms, space])


def memory_now() -> MachineMemory:
    """Of this process, in the tightest of its bounds: the machine, its control group, its address space."""
    statm = (_PROCESS / "statm").read_text().split()
    size, held = (int(pages) * os.sysconf("SC_PAGE_SIZE") for pages in statm[:2])
    machine = _machine()
    bounds = [(machine["MemTotal"] - machine["MemAvailable"], machine["MemTotal"]), *_bounds()]
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if space != resource.RLIM_INFINITY:
        bounds.append((size, space))
    used, room = min(bounds, key=lambda bound: bound[1] - bound[0])
    return MachineMemory(held=held, used=used, room=room)


def bound_of(group: Path) -> tuple[int, int] | None:
    """Bytes that are used of those allowed, without what the kernel would give back; None without a limit."""
    first = (group / "memory.limit_in_bytes").exists()
    limit, used = ("limit_in_bytes", "usage_in_bytes") if first else ("max", "current")
    try:
        most = (group / f"memory.{limit}").read_text().strip()
        current = int((group / f"memory.{used}").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except FileNotFoundError:  # the outermost group of the second version has none of these
        return None
    if most == "max" or int(most) >= UNLIMITED:
        return None
    files, shared = ("total_cache", "total_shmem") if first else ("file", "shmem")
    cached = int(stat.get(files, 0)) - int(stat.get(shared, 0))
    return max(current - cached, 0), int(most)


def _bounds() -> list[tuple[int, int]]:
    return [bound for group in control_groups("memory") if (bound := bound_of(group)) is not None]


def _machine() -> dict[str, int]:
    lines = (line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
    return {name: int(value.split()[0]) * 1024 for name, value in lines}
