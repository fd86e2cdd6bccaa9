"""Graceful changes of one run of ours, in a process and a cluster of its own: run by benchmarks.switch.

Nodes of one worker join and drain in turns. A change's gap lies between the last step that the old group
committed and the first of the new one, as the controller journals them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import elastic_train as et
from benchmarks.problem import Problem
from benchmarks.switch.cases import (
    CHECKPOINT_EVERY,
    GIVE_UP_S,
    GLOBAL_BATCH,
    MICRO_BATCH,
    NOTICE_S,
    SETTLED,
    WORKERS,
    Way,
)
from elastic_train.cluster import ray_private
from elastic_train.cluster.driver.launch import fit, prepare_local_environment
from elastic_train.cluster.faults.cluster_faults import Chaos
from elastic_train.cluster.local_cluster import LocalCluster
from elastic_train.cluster.run_updates import RunUpdate
from elastic_train.config import RunSpec
from elastic_train.control.events import GroupReady, StepCommitted
from elastic_train.control.fault_schedule import FaultSchedule
from elastic_train.observe.journal_records import Record
from elastic_train.storage.store import Store


@dataclass(frozen=True, slots=True)
class Asked:
    """A change that was set off."""

    way: Way
    at: float  # wall time
    workers: int  # that train afterwards


class Changes(Chaos):
    """Adds and drains nodes in turns, each once the group before has settled, and then stops the run."""

    def __init__(self, cluster: LocalCluster, ways: Sequence[Way], settled: int) -> None:
        super().__init__(cluster, FaultSchedule(faults=()), lambda text: None)
        self._local, self._left, self._added = cluster, list(ways), [node.node_id for node in cluster.nodes]
        self._steps: list[tuple[int, int]] = []  # generation, step
        self._workers: dict[int, int] = {}  # by generation
        self._since, self._over, self._enough = time.monotonic(), False, settled
        self.asked: list[Asked] = []

    def on_update(self, update: RunUpdate, controller: Any, store: Store) -> None:
        for record in update.records:
            if record.formed is not None:
                self._workers[record.formed.generation] = len(record.formed.workers)
            if isinstance(record.event, StepCommitted):
                self._steps.append((record.event.generation, record.event.step))
        if self._over:
            return
        late = time.monotonic() - self._since > GIVE_UP_S
        if late or (self._settled() and not self._left):
            self._over = True
            controller.stop.remote("measured")
        elif self._settled():
            self._set_off(self._left.pop(0))

    def _settled(self) -> bool:
        """Whether the group that the last change asked for has trained for a while."""
        if not self._steps:
            return False
        newest = self._steps[-1][0]
        wanted = self.asked[-1].workers if self.asked else WORKERS
        return (
            self._workers.get(newest) == wanted and sum(g == newest for g, _ in self._steps) >= self._enough
        )

    def _set_off(self, way: Way) -> None:
        workers = self._workers[self._steps[-1][0]]
        self._since = time.monotonic()
        if way == "growth":
            self.asked.append(Asked(way, time.time(), workers + 1))
            self._added.append(self._local.add_node())
        else:
            self.asked.append(Asked(way, time.time(), workers - 1))
            ray_private.drain_node(self._added.pop(), NOTICE_S)


def measured(records: Sequence[Record], asked: Sequence[Asked]) -> list[dict[str, Any]]:
    """Each change that was set off, with the seconds and steps that training stood still."""
    steps = [(r.seconds, r.event.generation) for r in records if isinstance(r.event, StepCommitted)]
    ready = {r.event.generation: r.seconds for r in records if isinstance(r.event, GroupReady)}
    parts = {r.event.generation: r.event.parts for r in records if isinstance(r.event, GroupReady)}
    ordered = {r.formed.generation: r.seconds for r in records if r.formed is not None}
    formed = {r.formed.generation: len(r.formed.workers) for r in records if r.formed is not None}
    found: list[dict[str, Any]] = []
    for change, after in itertools.zip_longest(asked, asked[1:]):
        until = after.at if after is not None else float("inf")
        here = [s for s in steps if change.at <= s[0] < until]
        switch = next(
            ((a, b) for a, b in itertools.pairwise(here) if a[1] != b[1] and formed[b[1]] == change.workers),
            None,
        )
        if switch is None:
            found.append({"way": change.way, "problem": "the group did not change in time"})
            continue
        (last, old), (first, new) = switch
        step_s = _pace([s for s in steps if s[1] == old and s[0] <= change.at])
        beside = _pace([s for s in steps if s[1] == old and s[0] > change.at])
        settled = _pace([s for s in steps if s[1] == new])
        found.append(
            {
                "way": change.way,
                "workers": change.workers,
                "gap_s": first - last,
                "gap_steps": (first - last) / step_s if step_s else None,
                "form_s": ready[new] - last,
                "pause_s": ordered[new] - last,
                "parts": dict(parts[new]),
                "first_step_s": first - ready[new],
                "step_s": step_s,
                "step_after_s": settled,
                "speed_beside": step_s / beside if step_s and beside else None,
                "asked_to_step_s": first - change.at,
            }
        )
    return found


def _pace(steps: Sequence[tuple[float, int]]) -> float | None:
    """Median seconds from step to step, without the first ones of the group."""
    seconds = [b[0] - a[0] for a, b in itertools.pairwise(steps)][2:]
    return statistics.median(seconds) if seconds else None


def run(size: str, ways: Sequence[Way]) -> list[dict[str, Any]]:
    prepare_local_environment()
    with tempfile.TemporaryDirectory(prefix="et-bench-") as storage, LocalCluster(WORKERS, cpus=1) as cluster:
        spec = RunSpec(
            name="switch",
            storage_path=storage,
            batch=et.Batch(global_size=GLOBAL_BATCH, micro_size=MICRO_BATCH),
            max_steps=100_000,
            min_workers=1,
            max_workers=WORKERS + 1,
            checkpoints=et.Checkpoints(every=CHECKPOINT_EVERY, keep=2),
            timing=et.Timing(join_window_s=0.5),
            standby=0,
        )
        changes = Changes(cluster, ways, SETTLED[size])
        result = fit(Problem(size=size), spec, address=None, local_nodes=0, quiet=True, chaos=changes)
    return measured(result.records, changes.asked)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("size")
    parser.add_argument("ways", nargs="+", choices=("growth", "drain"))
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()
    given.json.write_text(json.dumps(run(given.size, given.ways), indent=1))
    os._exit(0)  # what Ray still has to end is nobody's measurement


if __name__ == "__main__":
    main()
