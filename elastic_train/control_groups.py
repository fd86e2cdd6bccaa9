"""Control groups around a process: what of a machine it may take. Linux only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

_MOUNTED = Path("/sys/fs/cgroup")
_PROCESS = Path("/proc/self")


def control_groups(
    controller: Literal["memory", "pids"], process: Path = _PROCESS, mounted: Path = _MOUNTED
) -> Iterator[Path]:
    """Directories of the groups in which a controller bounds a process, from its own to the outermost."""
    for line in (process / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            root = mounted / controller
        elif not controllers and (mounted / "cgroup.controllers").exists():
            root = mounted
        else:
            continue
        group = root / path.lstrip("/")
        if not group.is_dir():  # in a container its own group is the root
            group = root
        while group.is_dir():
            yield group
            if group == root:
                break
            group = group.parent
