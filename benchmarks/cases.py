"""The cases of the recovery benchmark: what is there, what is killed, who trains afterwards."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

GLOBAL_BATCH, MICRO_BATCH = 16, 4
CHECKPOINT_EVERY = 10
KILL_AFTER = 55  # committed steps at least; the kill comes five steps after a checkpoint
KEEP_ON = 10  # steps that both systems still train after they are back
GIVE_UP_S = 300.0  # to be started and killed, and again to be back


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`workers` on 2 nodes of 2 CPUs, perhaps a third node with room; `planned` workers after the kill."""

    name: str
    says: str
    kills: str  # "node" or "worker"
    least: int  # workers that are allowed
    planned: int
    spare: bool
    standby: int  # workers that we keep ready on the spare node; Ray Train has no such thing
    workers: int = 4
    nodes: int = 2
    cpus: int = 2


CASES = {
    case.name: case
    for case in (
        Case(
            name="node",
            says="a node is killed, a third one has room",
            kills="node",
            least=4,
            planned=4,
            spare=True,
            standby=2,
        ),
        Case(
            name="crash",
            says="one worker is killed, a third node has room",
            kills="worker",
            least=4,
            planned=4,
            spare=True,
            standby=2,
        ),
        Case(
            name="shrink",
            says="a node is killed, nothing replaces it: 4 -> 2 workers",
            kills="node",
            least=1,
            planned=2,
            spare=False,
            standby=0,
        ),
        Case(
            name="cold",
            says="a node is killed, a third one has room, no worker stands by",
            kills="node",
            least=4,
            planned=4,
            spare=True,
            standby=0,
        ),
    )
}


def sigkill(pids: Iterable[int]) -> float:
    """SIGKILL them all, in order; the wall time just before the first one."""
    at = time.time()
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return at
