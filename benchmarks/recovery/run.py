"""One recovery of ours, in a process and a cluster of its own: run by benchmarks.recovery.

The wall time of the kill is taken just before the signal. A step counts as committed when the controller
journals it, which is after its vote passed on all ranks of the group.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import elastic_train as et
from benchmarks.problem import Problem
from benchmarks.recovery.cases import (
    CASES,
    CHECKPOINT_EVERY,
    GIVE_UP_S,
    MICRO_BATCH,
    Case,
    sigkill,
)
from elastic_train.cluster.driver.launch import fit, prepare_local_environment
from elastic_train.cluster.faults.cluster_faults import Chaos
from elastic_train.cluster.local_cluster import LocalCluster
from elastic_train.cluster.run_updates import RunUpdate
from elastic_train.config import RunSpec
from elastic_train.control.events import GroupBroken, GroupReady, StepCommitted, WorkerLost, WorkerReady
from elastic_train.control.fault_schedule import FaultSchedule
from elastic_train.observe.journal_records import Record
from elastic_train.storage.store import Store

PARTS = ("detect_s", "decide_s", "rebuild_s", "transfer_s", "first_step_s", "parts")


class Killer(Chaos):
    """Adds the spare node once the group trains, kills five steps after a checkpoint, stops when over.

    With several `kills` the next one comes once the last is over and as many workers stand by as before.
    """

    def __init__(self, cluster: LocalCluster, case: Case, kills: int = 1) -> None:
        super().__init__(cluster, FaultSchedule(faults=()), lambda text: None)
        self._case, self._left = case, kills
        self._records: list[Record] = []
        self._spare: str | None = None
        self._since = time.monotonic()
        self._stopped = False
        self.killed_at: list[float] = []

    def on_update(self, update: RunUpdate, controller: Any, store: Store) -> None:
        self._records += update.records
        if time.monotonic() - self._since > GIVE_UP_S or (self._over() and not self._left):
            if not self._stopped:
                controller.stop.remote("measured")
            self._stopped = True
        elif self._left and (not self.killed_at or self._over()) and self._trains():
            if self._case.spare and self._spare is None:
                self._spare = self._cluster.add_node()
            elif self._standing_by() and self._now_is_the_time(update):
                self._kill(update)

    def _over(self) -> bool:
        found = measure(self._records, self.killed_at[-1], self._case.planned) if self.killed_at else None
        return found is not None and self._steps()[-1] >= found["first_step"] + self._case.keep_on

    def _steps(self) -> list[int]:
        return [r.event.step for r in self._records if isinstance(r.event, StepCommitted)] or [0]

    def _trains(self) -> bool:
        formed = [r.formed for r in self._records if r.formed is not None]
        return (
            bool(formed)
            and len(formed[-1].workers) == self._case.workers
            and self._steps()[-1] > min(5, self._case.kill_after)
        )

    def _standing_by(self) -> bool:
        ready = [r for r in self._records if isinstance(r.event, WorkerReady)]
        lost = len(self.killed_at)
        return len(ready) >= self._case.workers + self._case.standby + lost

    def _now_is_the_time(self, update: RunUpdate) -> bool:
        newest = [r.event.step for r in update.records if isinstance(r.event, StepCommitted)]
        if not newest or self.killed_at:
            return bool(newest)
        return newest[-1] > self._case.kill_after and newest[-1] % CHECKPOINT_EVERY == 5

    def _kill(self, update: RunUpdate) -> None:
        """The last rank, or everything on its node, once so much of a step is over."""
        steps = [r.event.seconds for r in self._records if isinstance(r.event, StepCommitted)]
        time.sleep(self._case.at * statistics.median(steps[-5:]))
        victim = max(update.heartbeats, key=lambda s: s.rank)
        if self._case.kills == "worker":
            pids = [victim.pid]
        else:
            ids = (node.node_id for node in self._cluster.nodes)
            pids = self._cluster.processes(next(i for i in ids if i.startswith(victim.node)))
        self.killed_at.append(sigkill(pids))
        self._since, self._left = time.monotonic(), self._left - 1


def measure(records: Sequence[Record], killed_at: float, planned: int) -> dict[str, Any] | None:
    """From the kill to the first step that a new group of `planned` workers committed; None if it never did.

    The seconds in between: until the loss was noticed (detect), until the new group was ordered, with the
    final reports of all that are left (decide), until its ranks had met and said what they need (rebuild),
    until they had fetched and proved it (transfer), until its first step.
    """
    before = [r for r in records if r.seconds <= killed_at]
    after = [r for r in records if r.seconds > killed_at]
    old = max((r.formed.generation for r in before if r.formed is not None), default=0)
    formed = {r.formed.generation: r for r in after if r.formed is not None and r.formed.generation > old}
    right = {g for g, r in formed.items() if r.formed and len(r.formed.workers) == planned}
    first = next(
        (r for r in after if isinstance(r.event, StepCommitted) and r.event.generation in right), None
    )
    if first is None or not isinstance(first.event, StepCommitted):
        return None
    order = formed[first.event.generation]
    assert order.formed is not None
    noticed = next((r for r in after if isinstance(r.event, WorkerLost | GroupBroken)), None)
    ready = next(
        r for r in after if isinstance(r.event, GroupReady) and r.event.generation == order.formed.generation
    )
    transfer_s = ready.event.transfer_s if isinstance(ready.event, GroupReady) else 0.0
    committed = [
        r.event.step for r in records if isinstance(r.event, StepCommitted) and r.event.generation <= old
    ]
    return {
        "kill_to_step_s": first.seconds - killed_at,
        "kill_to_ready_s": ready.seconds - killed_at,
        "detect_s": None if noticed is None else noticed.seconds - killed_at,
        "decide_s": None if noticed is None else order.seconds - noticed.seconds,
        "rebuild_s": ready.seconds - order.seconds - transfer_s,
        "transfer_s": transfer_s,
        "first_step_s": first.seconds - ready.seconds,
        "parts": dict(ready.event.parts) if isinstance(ready.event, GroupReady) else {},
        "first_step": first.event.step,
        "steps_redone": max(committed) - order.formed.step,
        "from": order.formed.source,
        "workers": len(order.formed.workers),
        "computed": ready.event.computed if isinstance(ready.event, GroupReady) else 0,
        "groups_tried": len(formed),
    }


def run(case: Case, kills: int = 1) -> dict[str, Any]:
    """What the first kill cost, and with several of them the seconds of each."""
    prepare_local_environment()
    with (
        tempfile.TemporaryDirectory(prefix="et-bench-") as storage,
        LocalCluster(case.nodes, cpus=case.cpus) as cluster,
    ):
        spec = RunSpec(
            name=case.name,
            storage_path=storage,
            batch=et.Batch(global_size=case.global_batch, micro_size=MICRO_BATCH),
            max_steps=100_000,
            min_workers=case.least,
            max_workers=case.workers,
            checkpoints=et.Checkpoints(every=CHECKPOINT_EVERY, keep=2, peers=case.peers),
            parallelism=et.Parallelism(dp_shard=case.dp_shard, dp_replicate=case.dp_replicate, pp=case.pp),
            standby=case.standby,
        )
        killer = Killer(cluster, case, kills)
        result = fit(Problem(size=case.size), spec, address=None, local_nodes=0, quiet=True, chaos=killer)
        records, kept = result.records, result.ledger.kept  # of a long run: read from its storage
    killed_at = killer.killed_at[0] if killer.killed_at else None
    found = measure(records, killed_at, case.planned) if killed_at is not None else None
    each = [measure(records, at, case.planned) for at in killer.killed_at]
    seconds = sorted(step.seconds for step in kept)
    if found is not None:
        again = case.global_batch // MICRO_BATCH - found["computed"]
        found["again_of_lost_share"] = again / (case.global_batch / MICRO_BATCH / case.workers)
    return {
        **(found or {"problem": "never killed" if killed_at is None else "did not come back in time"}),
        "step_s": seconds[len(seconds) // 2] if seconds else None,
        "each_s": [one["kill_to_step_s"] if one is not None else None for one in each],
        "each": [{name: one[name] for name in PARTS} if one is not None else None for one in each],
        "events": timeline(records, killed_at or records[0].seconds),
    }


def timeline(records: Sequence[Record], killed_at: float) -> list[str]:
    """What the controller did from the kill on: where the time went."""
    reported = [r for r in records if r.seconds >= killed_at and not isinstance(r.event, StepCommitted)]
    return [
        f"+{r.seconds - killed_at:.3f} {type(r.event).__name__}: {r.reason} {' '.join(r.commands)}"
        for r in reported[:40]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--kills", type=int, default=1, help="One after the other, in one run.")
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()
    given.json.write_text(json.dumps(run(CASES[given.case], given.kills), indent=1))


if __name__ == "__main__":
    main()
