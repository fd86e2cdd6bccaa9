"""Our run through a trace, in a process and a cluster of its own: run by benchmarks.spot."""

from __future__ import annotations

import tempfile
import time
from typing import Any

import elastic_train as et
from benchmarks.spot.case import (
    CHECKPOINT_EVERY,
    GLOBAL_BATCH,
    MICRO_BATCH,
    TELL_S,
    Given,
    Waiting,
    given,
)
from benchmarks.spot.trace import Replay
from elastic_train.cluster.driver.launch import fit, prepare_local_environment
from elastic_train.cluster.faults.cluster_faults import Chaos
from elastic_train.cluster.local_cluster import LocalCluster
from elastic_train.cluster.run_updates import RunUpdate
from elastic_train.config import RunSpec
from elastic_train.control.events import StepCommitted
from elastic_train.control.fault_schedule import FaultSchedule
from elastic_train.errors import ElasticTrainError
from elastic_train.observe.goodput import goodput
from elastic_train.observe.journal_records import from_json
from elastic_train.observe.ledger import ledger
from elastic_train.observe.reconfigurations import history, table
from elastic_train.observe.text_columns import columns
from elastic_train.storage.fsspec_store import child_url, open_store
from elastic_train.storage.journal import read_journal
from elastic_train.storage.store import Store


class Market(Chaos):
    """Follows the trace from the first step on and stops the run when it is over."""

    def __init__(self, cluster: LocalCluster, case: Given) -> None:
        super().__init__(cluster, FaultSchedule(faults=()), lambda text: None)
        self.replay = Replay(cluster, case.trace, seed=case.seed)
        self.submitted = self._reported = time.time()
        self.ended: float | None = None
        self._case, self._local = case, cluster

    def on_update(self, update: RunUpdate, controller: Any, store: Store) -> None:
        now = time.time()
        if any(isinstance(record.event, StepCommitted) for record in update.records):
            self.replay.begin(now)
        self.replay.due(now, lambda node: self._local.kill_node(node))
        if self.ended is None and self.replay.over(now, self._case.seconds):
            self.ended = now
            controller.stop.remote("the trace is over")
        if now - self._reported > TELL_S:
            self._reported = now
            self._case.tell(self.account(store))

    def account(self, store: Store) -> dict[str, Any]:
        """What the run's storage knows of it until now, or until the trace was over."""
        now = time.time()
        until = self.ended or now
        records = [from_json(line) for _, part in read_journal(store) for line in part]
        book, changes = ledger(records), table(history(records))
        spent = goodput([r for r in records if r.seconds <= until], submitted=self.submitted)
        badput = dict(spent.badput)
        since_start = until - self.submitted - badput.get("start", 0.0)
        kept = [entry.step for entry in book.kept]
        step = kept[-1] if kept else 0
        return {
            "progress": f"{now - self.submitted:.0f} s: step {step}, {self.replay.nodes} nodes",
            "goodput": spent.good_s / (until - self.submitted),
            "after_start": spent.good_s / since_start if since_start > 0 else None,
            "good_s": spent.good_s,
            "wall_s": until - self.submitted,
            "steps": len(kept),
            "steps_redone": len(book.superseded),
            "exact": kept == list(range(1, len(kept) + 1)),
            "groups": sum(record.formed is not None for record in records),
            "changes": self.replay.done,
            "badput": badput,
            "summary": columns(changes).splitlines(),
            "switches": [dict(zip(changes[0], row, strict=True)) for row in changes[1:]],
        }


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
        market, problem = Market(cluster, case), {}
        try:
            fit(Waiting(), spec, address=None, local_nodes=0, quiet=False, chaos=market)
        except ElasticTrainError as error:
            problem = {"problem": str(error)}
            market.ended = (market.replay.begun or time.time()) + case.seconds
        return {**market.account(open_store(child_url(storage, spec.name))), **problem}


if __name__ == "__main__":
    chosen = given(__doc__ or "")
    chosen.tell(run(chosen))
