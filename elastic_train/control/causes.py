"""Why a group, a worker or a run ended, as a value: whose fault it is, and where it was met."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

CauseKind = Literal[
    "collective",
    "death",
    "silence",
    "hang",
    "user",
    "memory",
    "engine",
    "preemption",
    "corruption",
    "storage",
    "damage",
    "restart",
]
"""Whose fault it is: `user` the job's; `storage` and `damage` (of a checkpoint) storage's; `engine` and
`restart` (of the controller) ours; the rest the machines'. A collective is only how others' ends are felt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Why something ended. `detail` is one line; `traceback` the user's own where there is one.

    After a corruption `trusted` is the last step at which replicas held the same. Where a device's memory was
    too small `peak` is what tensors took of it, in bytes. `worker` is whose process ended, where one did.
    """

    kind: CauseKind
    detail: str
    phase: str = ""
    step: int = 0
    rank: int = -1
    node: str = ""
    traceback: str = ""
    trusted: int | None = None
    worker: str = ""
    peak: int = 0
