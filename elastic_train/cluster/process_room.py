"""How many more processes and threads may begin here. Each of Ray's processes has dozens of threads, and where
one can't begin Ray waits for it without a word.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from elastic_train.control_groups import control_groups

LOCAL_HEAD = 150
"""Processes and threads of a head without a dashboard, on a machine of 2 cores; more cores have more."""
LOCAL_NODE = 100
"""Of a node with its part of a run: a worker, a peer store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRoom:
    """Processes and threads there are of those that may be, and the file that says so."""

    used: int
    most: int
    bound: Path

    @property
    def left(self) -> int:
        return max(self.most - self.used, 0)


def process_room() -> ProcessRoom | None:
    """Of the tightest control group around this process; None where none bounds it."""
    rooms = [room for group in control_groups("pids") if (room := room_of(group)) is not None]
    return min(rooms, key=lambda room: room.left, default=None)


def room_of(group: Path) -> ProcessRoom | None:
    """Of one group; None where it bounds nothing."""
    bound = group / "pids.max"
    try:
        most, used = bound.read_text().strip(), int((group / "pids.current").read_text())
    except FileNotFoundError:  # the outermost group has none
        return None
    return None if most == "max" else ProcessRoom(used=used, most=int(most), bound=bound)
