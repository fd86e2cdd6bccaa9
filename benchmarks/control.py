"""What does a decision of the controller cost as the cluster grows?

python -m benchmarks.control [--quick] [--json FILE]

A run of as many workers as nodes begins, saves a checkpoint, loses a node, leaves another one with notice,
and loses a quarter of its workers, one by one. Every survivor says that a collective failed. Every event goes
through `control.transition`, as in the controller's one deciding thread, under a planner that costs next to
nothing: what is measured is control and recovery. A decision is one event. Reported are the slowest one, and
all of an incident together, from the loss to the order to form again: of one worker, and of a quarter of all,
each missed by itself. The growth exponent is that of the slowest decision over the number of workers: 1 is
linear.
"""

from __future__ import annotations

import gc
import math
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from benchmarks import record
from elastic_train.control.events import (
    Cause,
    CheckpointCommitted,
    Event,
    FinalReport,
    GroupBroken,
    GroupReady,
    Node,
    NodesChanged,
    PartWritten,
    PeersHeld,
    StepCommitted,
    TermBegan,
    Tick,
    WorkerLost,
    WorkerReady,
)
from elastic_train.control.policy import Policy
from elastic_train.control.states import Facts, Forming, Running, State, members
from elastic_train.control.transition import transition
from elastic_train.recovery.evidence import LocalState, Stored, Vote
from elastic_train.testing.simulator import simulated_policy

SIZES = (100, 400, 1000, 4000)
QUICK_SIZES = (100, 400, 1000)
ROUNDS, QUICK_ROUNDS = 5, 3
RACK = 16
"""Nodes of one failure domain."""
VOTE = 16
"""Numbers of a vote."""


@dataclass(slots=True)
class Run:
    """A run that is driven event by event. `spent` has the seconds of every decision, by its occasion."""

    policy: Policy
    state: State = field(default_factory=State)
    at: float = 0.0
    spent: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    @property
    def facts(self) -> Facts:
        return self.state.facts

    def hear(self, about: str, kind: type[Any], **values: Any) -> None:
        self.at += 1e-3
        event: Event = kind(at=self.at, **values)
        began = time.thread_time()
        self.state = transition(self.state, event, self.policy).state
        self.spent[about].append(time.thread_time() - began)

    def nodes(self, about: str, nodes: tuple[Node, ...]) -> None:
        self.hear(about, NodesChanged, nodes=nodes)

    def ready(self) -> None:
        for worker in self.facts.membership.workers:
            if worker.status == "starting":
                self.hear("start", WorkerReady, worker=worker.name, node=worker.node, pid=1)

    def train(self, steps: int) -> None:
        assert isinstance(self.state.phase, Forming), self.state.phase
        generation = self.facts.lineage.generation
        self.hear("form", GroupReady, generation=generation, step=self.facts.lineage.step, seconds=1.0)
        for step in range(self.facts.lineage.step + 1, self.facts.lineage.step + 1 + steps):
            fields = {"loss": 1.0, "tokens": 1.0, "grad_norm": 1.0, "skipped": False, "seconds": 1.0}
            vote = (float(step),) * VOTE
            self.hear("step", StepCommitted, generation=generation, step=step, vote=vote, **fields)
            self.hear("step", Tick)
        assert isinstance(self.state.phase, Running)

    def broken(self, about: str) -> None:
        """Everybody says that a collective failed, each in words of its own."""
        generation, step = self.facts.lineage.generation, self.facts.lineage.step
        for rank, name in enumerate(self.facts.lineage.plans[-1][1].workers):
            cause = Cause(kind="collective", detail=f"connection to {rank} closed", step=step, rank=rank)
            self.hear(about, GroupBroken, generation=generation, worker=name, cause=cause)

    def settle(self, about: str = "incident", *, calm: bool = False) -> None:
        """Everybody's final report, with an error where it isn't `calm`."""
        generation, step = self.facts.lineage.generation, self.facts.lineage.step
        ranks = {name: rank for rank, name in enumerate(self.facts.lineage.plans[-1][1].workers)}
        vote = Vote(step=step, values=(float(step),) * VOTE)
        for name in members(self.state.phase):
            rank = ranks[name]
            held = LocalState(generation=generation, rank=rank, step=step, applied=vote)
            error = None if calm else Cause(kind="collective", detail=f"aborted at {rank}", rank=rank)
            said = {"generation": generation, "worker": name, "local_states": (held,), "error": error}
            self.hear(about, FinalReport, **said)

    def save(self) -> None:
        generation, step = self.facts.lineage.generation, self.facts.lineage.step
        for rank in range(len(self.facts.lineage.plans[-1][1].workers)):
            part = {"manifest": f"w{rank:05d}.parquet", "digest": "0", "seconds": 1.0, "bytes": 1}
            self.hear("save", PartWritten, generation=generation, step=step, rank=rank, **part)
        stored = Stored(slot=step, step=step, generation=generation, term=1, path=f"checkpoints/{step}")
        self.hear("save", CheckpointCommitted, stored=stored)


def machines(number: int) -> tuple[Node, ...]:
    return tuple(Node(name=f"n{i:05d}", slots=1, domain=f"rack{i // RACK}") for i in range(number))


def live(workers: int, kind: type[Run] = Run) -> Run:
    """A run's whole life, with everything that control does as often as there are workers."""
    policy = simulated_policy(replicas=2, max_steps=1_000_000)
    run = kind(policy=replace(policy, min_workers=2, max_workers=workers, standby=0))
    nodes = machines(workers)
    run.hear("start", TermBegan, term=1, stored=None, ever_stored=False)
    run.nodes("start", nodes)
    run.ready()
    run.train(10)
    run.save()
    for node in nodes:
        sizes = {"own": 1, "copies": 1, "room": 9, "spilled": 0, "every": 1.0, "cost_s": 1.0}
        run.hear("peer_stores", PeersHeld, node=node.name, step=10, **sizes)
    lost = run.facts.lineage.plans[-1][1].workers[workers // 2]
    run.hear("incident", WorkerLost, worker=lost, cause=Cause(kind="death", detail="gone"))
    run.broken("incident")
    run.settle()
    run.train(3)
    run.ready()
    leaving = replace(nodes[1], drain_by=run.at + 5.0)
    run.nodes("drain", (nodes[0], leaving, *nodes[2:]))
    run.settle("drain", calm=True)
    run.train(3)
    for number, lost in enumerate(run.facts.lineage.plans[-1][1].workers[: workers // 4]):
        cause = Cause(kind="death", detail=f"process {number} ended")
        run.hear("rack", WorkerLost, worker=lost, cause=cause)
    run.broken("rack")
    run.settle("rack")
    run.ready()
    run.train(3)
    half = tuple(node for number, node in enumerate(nodes) if number % 2 == 0)
    run.nodes("half", half)
    run.settle("half")
    run.train(3)
    return run


def measured(workers: int, rounds: int) -> Iterator[dict[str, Any]]:
    for number in range(rounds):
        gc.collect()
        run = live(workers)
        yield {
            "workers": workers,
            "round": number,
            "decide_s": max(max(times) for times in run.spent.values()),
            "incident_s": sum(run.spent["incident"]),
            "rack_s": sum(run.spent["rack"]),
            "slowest_s": {about: max(times) for about, times in run.spent.items()},
            "all_s": {about: sum(times) for about, times in run.spent.items()},
        }


def exponent(results: list[dict[str, Any]], what: str) -> float:
    """The slope of the medians over the workers, both as logarithms."""
    sizes = sorted({entry["workers"] for entry in results})
    medians = [record.median(e[what] for e in results if e["workers"] == size) or 0.0 for size in sizes]
    slope, _ = np.polyfit([math.log(size) for size in sizes], [math.log(value) for value in medians], 1)
    return float(slope)


def main(arguments: list[str]) -> int:
    given = record.options(__doc__.splitlines()[0] if __doc__ else "").parse_args(arguments)
    sizes, rounds = (QUICK_SIZES, QUICK_ROUNDS) if given.quick else (SIZES, ROUNDS)
    results: list[dict[str, Any]] = []
    for size in sizes:
        print(f"{size} workers", flush=True)
        results += measured(size, rounds)

    def typical(size: int, what: str) -> float | None:
        return record.median(entry[what] for entry in results if entry["workers"] == size)

    about = sorted(results[0]["slowest_s"])
    rows = [
        [
            size,
            typical(size, "decide_s"),
            typical(size, "incident_s"),
            typical(size, "rack_s"),
            *(record.median(e["slowest_s"][a] for e in results if e["workers"] == size) for a in about),
        ]
        for size in sizes
    ]
    print(record.table(["workers", "slowest (s)", "incident (s)", "rack (s)", *about], rows))
    whole = record.record(
        "control",
        results=results,
        headline={
            "decide_s_1000": typical(1000, "decide_s"),
            "incident_s_1000": typical(1000, "incident_s"),
            "growth_exponent": exponent(results, "decide_s"),
            "incident_exponent": exponent(results, "incident_s"),
            "rack_exponent": exponent(results, "rack_s"),
        },
    )
    record.finish(whole, given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
