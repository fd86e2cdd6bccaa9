"""The process that drives a run, as its own machine knows it."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass

from elastic_train.cluster.process_stat import BEGAN, STATE, stat_fields

_ENDED = frozenset("ZX")
"""States of the kernel's in which a process is only a number: a zombie, dead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverProcess:
    """`began` is the kernel's clock at its start: a number of a process is used again."""

    pid: int
    host: str
    began: int

    @classmethod
    def here(cls) -> DriverProcess:
        """This process."""
        _, began = _seen(os.getpid()) or ("", 0)
        return cls(pid=os.getpid(), host=os.uname().nodename, began=began)

    def is_there(self) -> bool:
        """Whether it lives, for one who asks on its machine. False where that can't be seen."""
        seen = _seen(self.pid)
        return seen is not None and seen[0] not in _ENDED and seen[1] == self.began

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}"


def _seen(pid: int) -> tuple[str, int] | None:
    """State and start of a process."""
    with suppress(OSError, ValueError, IndexError):
        fields = stat_fields(pid)
        return fields[STATE], int(fields[BEGAN])
    return None
