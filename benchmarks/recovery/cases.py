"""The cases of the recovery benchmark: what is there, what is killed, who trains afterwards."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

GLOBAL_BATCH, MICRO_BATCH = 16, 4
CHECKPOINT_EVERY = 10
KILL_AFTER = 55  # committed steps at least; the kill comes five steps after a checkpoint
KEEP_ON = 10  # steps that both systems still train after they are back
GIVE_UP_S = 300.0  # to be started and killed, and again to be back


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`workers` on 2 nodes of 2 CPUs, perhaps a third node with room; `planned` workers after the kill.

    Data parallel, unless an axis is given: those rows are ours alone, each for a rung of
    the ladder back. `peers` is how often a snapshot goes to peer memory. The kill comes at the share `at` of
    a step.
    """

    name: str
    says: str
    kills: str  # "node" or "worker"
    least: int = 4  # workers that are allowed
    planned: int = 4
    spare: bool = True
    standby: int = 2  # workers that we keep ready on the spare node; Ray Train has no such thing
    workers: int = 4
    nodes: int = 2
    cpus: int = 2
    dp_shard: int | None = None
    dp_replicate: int | None = None
    pp: int | None = None
    peers: int | Literal["auto"] | None = "auto"
    size: str = "tiny"
    kill_after: int = KILL_AFTER
    global_batch: int = GLOBAL_BATCH
    at: float = 0.0
    keep_on: int = KEEP_ON

    @property
    def everybody(self) -> bool:
        """Whether peers can do the same."""
        return self.dp_shard is None and self.pp is None and not self.at

    @property
    def systems(self) -> tuple[str, ...] | None:
        """Those that are compared, None for all: large models are run by us and by Ray Train."""
        return None if self.size == "tiny" else ("elastic_train", "ray_train")


AT_SIZE: Mapping[str, Any] = {
    "kills": "node",
    "workers": 3,
    "nodes": 3,
    "cpus": 1,
    "least": 1,
    "planned": 2,
    "spare": False,
    "standby": 0,
}

CASES = {
    case.name: case
    for case in (
        Case(
            name="node",
            says="a node is killed, a third one has room",
            kills="node",
        ),
        Case(
            name="crash",
            says="one worker is killed, a third node has room",
            kills="worker",
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
            standby=0,
        ),
        Case(
            name="at_6m",
            says="a node is killed, nothing replaces it: 3 -> 2 workers, 6 M parameters",
            size="small",
            kill_after=25,
            **AT_SIZE,
        ),
        Case(
            name="at_85m",
            says="a node is killed, nothing replaces it: 3 -> 2 workers, 85 M parameters",
            size="base",
            kill_after=11,
            **AT_SIZE,
        ),
        Case(
            name="at_368m",
            says="a node is killed, nothing replaces it: 2 -> 1 workers, 368 M parameters, no peer snapshots",
            size="medium",
            kill_after=4,
            global_batch=2 * MICRO_BATCH,
            keep_on=1,
            peers=None,
            **AT_SIZE | {"workers": 2, "nodes": 2, "planned": 1},
        ),
        Case(
            name="late",
            says="one of four workers is killed at 90 % of a step of 16 micro-batches; nothing replaces it",
            size="small",
            kill_after=15,
            global_batch=16 * MICRO_BATCH,
            at=0.9,
            **AT_SIZE | {"workers": 4, "nodes": 4, "planned": 3},
        ),
        Case(
            name="peer",
            says="a worker with a quarter of the state is killed; peer memory has it of every step",
            kills="worker",
            dp_shard=4,
            dp_replicate=1,
            peers=1,
        ),
        Case(
            name="log",
            says="one of four pipeline stages is killed; its neighbours logged what they sent",
            kills="worker",
            pp=4,
            peers=None,
        ),
        Case(
            name="storage",
            says="a worker with a quarter of the state is killed; storage alone has it",
            kills="worker",
            dp_shard=4,
            dp_replicate=1,
            peers=None,
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
