"""Graceful changes of one run of ours, in a process and a cluster of its own: run by benchmarks.switch.

Nodes of one worker join, drain and become slow, as a case says. A change's gap lies between the last step
that the old group committed and the first of the new one, as the controller journals them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import elastic_train as et
from benchmarks.problem import Problem
from benchmarks.switch.cases import (
    BATCHES,
    CASES,
    CHECKPOINT_EVERY,
    EVICT_SLOWER_THAN,
    GIVE_UP_S,
    GLOBAL_BATCH,
    MICRO_BATCH,
    NOTICE_S,
    SETTLED,
    SLOW_S,
    Case,
    Change,
)
from benchmarks.switch.peak_memory import PeakMemory
from elastic_train.cluster import ray_private
from elastic_train.cluster.actor_names import short
from elastic_train.cluster.driver.launch import fit, prepare_local_environment
from elastic_train.cluster.faults.cluster_faults import Chaos
from elastic_train.cluster.local_cluster import LocalCluster
from elastic_train.cluster.run_updates import RunUpdate
from elastic_train.config import RunSpec
from elastic_train.control.events import GroupReady, StepCommitted, WorkerReady
from elastic_train.control.fault_schedule import FaultSchedule, Moment, SlowNode
from elastic_train.observe.journal_records import FormedGroup, Record
from elastic_train.storage.store import Store

FIRST_STEPS = 3  # of a group, in which the memory of snapshots is made


@dataclass(frozen=True, slots=True)
class Asked:
    """A change that was set off."""

    name: str
    at: float  # wall time
    workers: int  # that train afterwards
    after: int = 0  # the generation that trained before
    peaks: Mapping[str, int] = field(default_factory=dict[str, int])  # bytes of each worker in steps before


class Changes(Chaos):
    """Sets a case's changes off in turns, each once the group before has settled, and then stops the run."""

    def __init__(self, cluster: LocalCluster, case: Case, turns: Sequence[Change], size: str) -> None:
        when, last = Moment(step=SETTLED[size] + 1), f"n{case.workers - 1}"
        slow = SlowNode(when=when, node=last, seconds=SLOW_S[size])
        super().__init__(cluster, FaultSchedule(faults=(slow,) if case.slow else ()), lambda text: None)
        self._local, self._left, self._enough = cluster, list(turns), SETTLED[size]
        self._there = [node.node_id for node in cluster.nodes]  # in the order in which they came
        self._steps: list[tuple[int, int]] = []  # generation, step
        self._formed: dict[int, FormedGroup] = {}  # by generation
        self._workers = case.workers  # that the last change leads to
        self._since, self._over = time.monotonic(), False
        self._memory = PeakMemory()
        self.peaks: dict[int, Mapping[str, int]] = {}  # by generation, from what set it off to its first step
        self.asked: list[Asked] = []

    def on_update(self, update: RunUpdate, controller: Any, store: Store) -> None:
        for record in update.records:
            if record.formed is not None:
                self._formed[record.formed.generation] = record.formed
            if isinstance(record.event, WorkerReady):
                self._memory.add(record.event.worker, record.event.pid)
            if isinstance(record.event, StepCommitted):
                self._steps.append((record.event.generation, record.event.step))
        self._look_at_memory()
        if self._over:
            return
        late = time.monotonic() - self._since > GIVE_UP_S
        if late or (self._settled() and not self._left):
            self._over = True
            controller.stop.remote("measured")
        elif self._settled():
            self._set_off(self._left.pop(0))

    def _look_at_memory(self) -> None:
        """What the steps of a group take, once its first two are over, and what a change takes."""
        peaks = self._memory.peaks()
        newest = self._steps[-1][0] if self._steps else 0
        if newest and newest not in self.peaks:
            self.peaks[newest] = peaks
        if sum(g == newest for g, _ in self._steps) < FIRST_STEPS:
            self._memory.mark()

    def _settled(self) -> bool:
        """Whether the group that the last change asked for has trained for a while."""
        if not self._steps:
            return False
        newest = self._steps[-1][0]
        group, after = self._formed.get(newest), self.asked[-1].after if self.asked else 0
        there = group is not None and newest > after and len(group.workers) == self._workers
        return there and sum(g == newest for g, _ in self._steps) >= self._enough

    def _set_off(self, change: Change) -> None:
        generation = self._steps[-1][0]
        self._since, self._workers = time.monotonic(), self._workers + change.by
        peaks = self._memory.peaks()
        self.asked.append(Asked(change.name, time.time(), self._workers, generation, peaks))
        self._memory.mark()
        training = [node for node in self._there if short(node) in self._formed[generation].nodes]
        for _ in range(change.adds):
            self._there.append(self._local.add_node())
        for _ in range(change.drains):
            self._there.remove(node := training.pop())
            ray_private.drain_node(node, NOTICE_S)


def measured(
    records: Sequence[Record], asked: Sequence[Asked], peaks: Mapping[int, Mapping[str, int]] | None = None
) -> list[dict[str, Any]]:
    """Each change that was set off, with the seconds and steps that training stood still. `peaks` are the
    bytes that each worker took for the change, by the generation that it led to.
    """
    steps = [(r.seconds, r.event.generation) for r in records if isinstance(r.event, StepCommitted)]
    ready = {r.event.generation: r.seconds for r in records if isinstance(r.event, GroupReady)}
    parts = {r.event.generation: r.event.parts for r in records if isinstance(r.event, GroupReady)}
    ordered = {r.formed.generation: r.seconds for r in records if r.formed is not None}
    groups = {r.formed.generation: r.formed.workers for r in records if r.formed is not None}
    formed = {generation: len(workers) for generation, workers in groups.items()}
    found: list[dict[str, Any]] = []
    for change, after in itertools.zip_longest(asked, asked[1:]):
        until = after.at if after is not None else float("inf")
        here = [s for s in steps if change.at <= s[0] < until]
        switch = next(
            ((a, b) for a, b in itertools.pairwise(here) if a[1] != b[1] and formed[b[1]] == change.workers),
            None,
        )
        if switch is None:
            found.append({"way": change.name, "problem": "the group did not change in time"})
            continue
        (last, old), (first, new) = switch
        step_s = _pace([s for s in steps if s[1] == old and s[0] <= change.at])
        beside = _pace([s for s in steps if s[1] == old and s[0] > change.at])
        settled = _pace([s for s in steps if s[1] == new])
        found.append(
            {
                "way": change.name,
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
                **_memory(change.peaks, (peaks or {}).get(new, {}), groups[old]),
            }
        )
    return found


def _memory(
    steps: Mapping[str, int], change: Mapping[str, int], members: Sequence[str]
) -> dict[str, float | None]:
    """What a member takes at the most in the steps before a change, how much more for the change, and what a
    newcomer takes.
    """
    both = [(steps[worker], change[worker]) for worker in members if worker in steps and worker in change]
    added = [change[worker] for worker in change if worker not in members]
    return {
        "step_gb": _gigabytes(before for before, _ in both),
        "change_more_gb": _gigabytes(after - before for before, after in both),
        "newcomer_gb": _gigabytes(added),
    }


def _gigabytes(sizes: Iterable[int]) -> float | None:
    """Of the largest."""
    largest = max(sizes, default=None)
    return round(largest / 1e9, 3) if largest is not None else None


def _pace(steps: Sequence[tuple[float, int]]) -> float | None:
    """Median seconds from step to step, without the first ones of the group."""
    seconds = [b[0] - a[0] for a, b in itertools.pairwise(steps)][2:]
    return statistics.median(seconds) if seconds else None


def run(size: str, case: Case, times: int) -> list[dict[str, Any]]:
    prepare_local_environment()
    nodes = case.workers + case.spare
    with tempfile.TemporaryDirectory(prefix="et-bench-") as storage, LocalCluster(nodes, cpus=1) as cluster:
        spec = RunSpec(
            name="switch",
            storage_path=storage,
            batch=et.Batch(global_size=BATCHES.get(size, GLOBAL_BATCH), micro_size=MICRO_BATCH),
            max_steps=100_000,
            min_workers=1,
            max_workers=max(case.sizes),
            parallelism=case.parallelism,
            checkpoints=et.Checkpoints(every=CHECKPOINT_EVERY, keep=2, peers=case.peers),
            timing=et.Timing(join_window_s=case.join_window_s),
            standby=case.spare,
            evict_slower_than=EVICT_SLOWER_THAN if case.slow else None,
        )
        changes = Changes(cluster, case, case.turns(times), size)
        result = fit(Problem(size=size), spec, address=None, local_nodes=0, quiet=True, chaos=changes)
        return measured(result.records, changes.asked, changes.peaks)  # of a long run they are in its storage


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("size", choices=SETTLED)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--times", type=int, default=1, help="how often its changes are made")
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()
    found = run(given.size, CASES[given.case], given.times)
    given.json.write_text(json.dumps(found, indent=1))
    os._exit(0)  # what Ray still has to end is nobody's measurement


if __name__ == "__main__":
    main()
