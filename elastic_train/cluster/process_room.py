"""How many more processes and threads may begin on a machine, and refusing one that is too narrow.

Each of Ray's processes has dozens of threads. Where one can't begin, Ray waits for it without a word.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRoom:
    """Processes and threads there are of those that may be, and the file that says so."""

    used: int
    most: int
    bound: str

    @property
    def left(self) -> int:
        return max(self.most - self.used, 0)

    def __str__(self) -> str:
        return f"{self.left} more processes and threads may begin, by {self.bound}"


def process_room() -> ProcessRoom | None:
    """Of the tightest control group around this process; None where none bounds it."""
    rooms = [room for group in control_groups("pids") if (room := room_of(group)) is not None]
    return min(rooms, key=lambda room: room.left, default=None)


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
            remedy=f"{REMEDY} Or lower local_nodes, or join a cluster: fit(address=...), or RAY_ADDRESS.",
        )


def too_narrow(room: ProcessRoom | None) -> str | None:
    """Why no worker can begin where there is such a room; None where one can."""
    if room is None or room.left >= WORKER:
        return None
    return (
        f"a worker and what goes with it are more than {WORKER} processes and threads, and {room}. {REMEDY}"
    )
