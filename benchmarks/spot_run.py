"""Our run through a trace, in a process and a cluster of its own: run by spot.py."""

from __future__ import annotations

import tempfile
import time
from typing import Any

import elastic_train as et
from benchmarks.spot_case import CHECKPOINT_EVERY, GLOBAL_BATCH, MICRO_BATCH, Given, Waiting, given
from benchmarks.trace import Replay
from elastic_train.cluster.board import Update
from elastic_train.cluster.chaos import Chaos
from elastic_train.cluster.launch import fit, prepare_local_environment
from elastic_train.cluster.local import LocalCluster
from elastic_train.config import RunSpec
from elastic_train.control.events import StepCommitted
from elastic_train.control.faults import FaultSchedule
from elastic_train.observe.goodput import goodput
from elastic_train.storage.store import Store


class Market(Chaos):
    """Follows the trace from the first step on and stops the run when it is over."""

    def __init__(self, cluster: LocalCluster, case: Given) -> None:
        super().__init__(cluster, FaultSchedule(faults=()), lambda text: None)
        self.replay = Replay(cluster, case.trace, seed=case.seed)
        self._case, self._local = case, cluster
        self.ended: float | None = None

    def on_update(self, update: Update, controller: Any, store: Store) -> None:
        now = time.time()
        if any(isinstance(record.event, StepCommitted) for record in update.records):
            self.replay.begin(now)
        self.replay.due(now, lambda node: self._local.kill_node(node))
        if self.ended is None and self.replay.over(now, self._case.seconds):
            self.ended = now
            controller.stop.remote("the trace is over")


def run(case: Given) -> dict[str, Any]:
    prepare_local_environment()
    with (
        tempfile.TemporaryDirectory(prefix="et-spot-") as storage,
        LocalCluster(case.trace[0].nodes) as cluster,
    ):
        spec = RunSpec(
            name="spot",
            storage_path=storage,
            batch=et.Batch(global_size=GLOBAL_BATCH, micro_size=MICRO_BATCH),
            max_steps=100_000,
            min_workers=1,
            max_workers=case.most,
            checkpoints=et.Checkpoints(every=CHECKPOINT_EVERY, keep=2),
            max_failures=100,
            standby=0,
            timing=et.Timing(join_window_s=1.0),
        )
        market, submitted = Market(cluster, case), time.time()
        result = fit(Waiting(), spec, address=None, local_nodes=0, quiet=False, chaos=market)
        ended = market.ended or time.time()
    kept = [entry.step for entry in result.ledger.kept]
    account = goodput([r for r in result.records if r.seconds <= ended], submitted=submitted)
    return {
        "goodput": account.good_s / (ended - submitted),
        "good_s": account.good_s,
        "wall_s": ended - submitted,
        "steps": len(kept),
        "steps_redone": len(result.ledger.superseded),
        "exact": kept == list(range(1, len(kept) + 1)),
        "groups": sum(record.formed is not None for record in result.records),
        "changes": market.replay.done,
        "badput": dict(account.badput),
        "summary": result.summary.splitlines(),
    }


if __name__ == "__main__":
    chosen = given(__doc__ or "")
    chosen.tell(run(chosen))
