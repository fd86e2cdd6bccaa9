"""The kind of change that a transition was (growth, drain, node lost, ...), with its subjects.

Reports, counts and hooks read this. Reasons are sentences for people, and may be reworded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from elastic_train.control.causes import CauseKind

ChangeKind = Literal[
    "growth",
    "shrink",
    "rebalance",
    "drain",
    "eviction",
    "stop",
    "node_lost",
    "worker_lost",
    "out_of_memory",
    "silence",
    "hang",
    "collective",
    "user_error",
    "corruption",
    "storage_trouble",
    "controller_fault",
    "takeover",
    "resubmission",
    "fenced",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """`nodes` and `workers` are those that it happened to; `before` and `after` are plans, as text.

    `cause` is the cause's own kind where somebody's end was the reason.
    """

    kind: ChangeKind
    nodes: tuple[str, ...] = ()
    workers: tuple[str, ...] = ()
    rank: int = -1
    step: int = 0
    cause: CauseKind | None = None
    before: str = ""
    after: str = ""
