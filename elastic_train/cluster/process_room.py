"""How many more processes and threads may begin on a machine, and refusing one that is too narrow.

Each of Ray's processes has dozens of threads. Where one can't begin, Ray waits for it without a word.
"""

from __future__ import annotations

import os
import re
import resource
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from elastic_train.cluster.process_stat import THREADS, stat_fields
from elastic_train.control_groups import control_groups
from elastic_train.errors import ConfigError
from elastic_train.planner.plan import counted

LOCAL_HEAD, LOCAL_NODE = 250, 160
"""Processes and threads of a local cluster's head with driver and controller, and of each of its nodes: 277
and 178 were counted with Ray 2.60 on 2 cores; more cores have more.
"""
WORKER = 90
"""Those that a run adds to a node with one worker: 103 were counted, of the worker and a peer store."""
REMEDY = (
    "Raise the limit: --pids-limit of docker and podman, podPidsLimit of a kubelet, TasksMax= of systemd."
)
USERS_REMEDY = "Raise the limit: `ulimit -u`, nproc of limits.conf, --ulimit nproc= of docker and podman."
UNBOUND = 1 << 21 | 1 << 24
"""The capabilities of who may go beyond a user's limit: CAP_SYS_ADMIN and CAP_SYS_RESOURCE."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRoom:
    """Processes and threads there are of those that may be, what says so, and how to have more."""

    used: int
    most: int
    bound: str
    remedy: str = REMEDY

    @property
    def left(self) -> int:
        return max(self.most - self.used, 0)

    def __str__(self) -> str:
        return f"{self.left} more processes and threads may begin, by {self.bound}"


def process_room() -> ProcessRoom | None:
    """Of the tightest control group around this process, or its user's if that is less; None where nothing
    bounds it.
    """
    rooms = [*map(room_of, control_groups("pids")), room_of_user()]
    return min((room for room in rooms if room is not None), key=lambda room: room.left, default=None)


def room_of_user(proc: Path = Path("/proc")) -> ProcessRoom | None:
    """Of this process's user; None where it may have any number, as root and the privileged may. What it has
    in other containers counts too, and isn't seen.
    """
    most, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    said = re.search(r"^CapEff:\s*(\w+)$", (proc / "self" / "status").read_text(), re.MULTILINE)
    privileged = os.getuid() == 0 or (said is not None and int(said[1], 16) & UNBOUND)
    if most == resource.RLIM_INFINITY or privileged:
        return None
    used = 0
    for process in proc.iterdir():
        with suppress(OSError):  # it has ended
            if process.name.isdigit() and process.stat().st_uid == os.getuid():
                used += int(stat_fields(int(process.name), proc=proc)[THREADS])
    return ProcessRoom(used=used, most=most, bound="ulimit -u", remedy=USERS_REMEDY)


def room_of(group: Path) -> ProcessRoom | None:
    """Of one control group; None where it bounds nothing."""
    bound = group / "pids.max"
    try:
        most, used = bound.read_text().strip(), int((group / "pids.current").read_text())
    except FileNotFoundError:  # the outermost group has none
        return None
    return None if most == "max" else ProcessRoom(used=used, most=int(most), bound=str(bound))


def check_local_room(nodes: int, room: ProcessRoom | None) -> None:
    """Refuse a local cluster of so many nodes where its processes can't all begin."""
    needed = LOCAL_HEAD + nodes * LOCAL_NODE
    if room is not None and room.left < needed:
        raise ConfigError(
            field="fit",
            problem=f"a local cluster of {counted(nodes, 'node')} has more than {needed} processes and "
            f"threads, and {room}.",
            remedy=f"{room.remedy} Or lower local_nodes, or join a cluster: fit(address=...), or "
            "RAY_ADDRESS.",
        )


def too_narrow(room: ProcessRoom | None) -> str | None:
    """Why no worker can begin where there is such a room; None where one can."""
    if room is None or room.left >= WORKER:
        return None
    needed = f"a worker and what goes with it are more than {WORKER} processes and threads"
    return f"{needed}, and {room}. {room.remedy}"
