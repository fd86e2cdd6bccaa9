"""Plays events to the transition and keeps what it answered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from elastic_train.config import Batch, RunSpec
from elastic_train.control.commands import Command
from elastic_train.control.events import (
    Cause,
    CheckpointCommitted,
    FinalReport,
    GroupBroken,
    GroupReady,
    Node,
    NodesChanged,
    PartWritten,
    StepCommitted,
    TermBegan,
    Tick,
    WorkerLost,
    WorkerReady,
)
from elastic_train.control.journal_codec import changed, fold
from elastic_train.control.policy import Policy
from elastic_train.control.states import Facts, Outcome, Phase, State, members
from elastic_train.control.transition import transition
from elastic_train.planner.plan import Infeasible, Plan
from elastic_train.planner.question import Planned, Planner, Question
from elastic_train.planner.search import planner_for
from elastic_train.recovery.evidence import LocalState, Stored
from elastic_train.testing.simulator import simulated_policy


def shown_only(planner: Planner, shown: Callable[[int], int]) -> Planner:
    """A planner that sees as many of the worker slots as `shown` says of their number."""

    def asked(question: Question) -> Planned | Infeasible:
        worker_slots = question.worker_slots
        return planner(replace(question, worker_slots=worker_slots[: shown(len(worker_slots))]))

    return asked


class Play:
    """`at` moves by a millisecond with every event, and by `wait`."""

    def __init__(self, policy: Policy) -> None:
        self.policy, self.state, self.at = policy, State(), 0.0
        self.outcome = Outcome(state=self.state)
        self.journal: list[Any] = []

    def __call__(self, kind: type[Any], **values: Any) -> Outcome:
        self.at += 0.001
        event = kind(at=self.at, **values)
        before = self.state
        self.outcome = transition(before, event, self.policy)
        self.state = self.outcome.state
        if changed(before, self.outcome):
            self.journal.append(event)
        return self.outcome

    # -- what it answered --------------------------------------------------------------------------------

    @property
    def facts(self) -> Facts:
        return self.state.facts

    @property
    def phase(self) -> Phase:
        return self.state.phase

    @property
    def plan(self) -> Plan:
        return self.facts.lineage.plans[-1][1]

    def ordered(self, kind: type[Any]) -> list[Any]:
        """Commands of a kind in the last outcome."""
        return [c for c in self.outcome.commands if isinstance(c, kind)]

    @property
    def commands(self) -> tuple[Command, ...]:
        return self.outcome.commands

    # -- events ------------------------------------------------------------------------------------------

    def wait(self, seconds: float, **values: Any) -> Outcome:
        self.at += seconds
        return self(Tick, **values)

    def begin(self, nodes: int = 3, *, slots: int = 1, stored: Stored | None = None) -> Play:
        """A term with workers starting on nodes a, b, c, ..."""
        self(TermBegan, term=self.facts.term + 1, stored=stored, ever_stored=stored is not None)
        self.nodes("abcdefgh"[:nodes], slots=slots)
        return self

    def nodes(self, names: str, *, slots: int = 1, leaving: str = "", by: float = 1000.0) -> Outcome:
        return self(
            NodesChanged,
            nodes=tuple(
                Node(name=name, slots=slots, drain_by=by if name in leaving else None) for name in names
            ),
        )

    def ready(self, *names: str) -> Outcome:
        """Workers, by default all that are starting, are up."""
        for worker in self.facts.membership.workers:
            if worker.status == "starting" and (not names or worker.name in names):
                self(WorkerReady, worker=worker.name, node=worker.node, pid=1)
        return self.outcome

    def running(self, nodes: int = 3, *, slots: int = 1, step: int = 0) -> Play:
        """A group that trains and committed `step` steps."""
        self.begin(nodes, slots=slots).ready()
        self.go()
        for number in range(1, step + 1):
            self.step(number)
        return self

    def go(self, *, late: int = 0) -> Outcome:
        return self(
            GroupReady,
            generation=self.facts.lineage.generation,
            step=self.facts.lineage.step,
            seconds=1.0,
            late=late,
        )

    def step(self, number: int, **values: Any) -> Outcome:
        fields: dict[str, Any] = {
            "generation": self.facts.lineage.generation,
            "loss": 1.0,
            "tokens": 100.0,
            "grad_norm": 1.0,
            "skipped": False,
            "seconds": 1.0,
            "vote": (float(number),),
        }
        return self(StepCommitted, step=number, **{**fields, **values})

    def lose(self, worker: str, kind: str = "death", **values: Any) -> Outcome:
        return self(WorkerLost, worker=worker, cause=Cause(kind=kind, detail=f"{worker} ended", **values))

    def broken(self, worker: str, kind: str = "collective", detail: str = "reset", **values: Any) -> Outcome:
        return self(
            GroupBroken,
            generation=self.facts.lineage.generation,
            worker=worker,
            cause=Cause(kind=kind, detail=detail, **values),
        )

    def local_state(self, worker: str, step: int, **values: Any) -> LocalState:
        return LocalState(
            generation=self.facts.lineage.generation,
            rank=self.plan.workers.index(worker),
            step=step,
            **values,
        )

    def settle(
        self, *workers: str, step: int | None = None, error: Cause | None = None, **held: Any
    ) -> Outcome:
        """Final reports, by default of everybody who is asked, at the newest committed step."""
        step = self.facts.lineage.step if step is None else step
        for worker in workers or members(self.phase):
            self(
                FinalReport,
                generation=self.facts.lineage.generation,
                worker=worker,
                local_states=(self.local_state(worker, step, **held),),
                error=error,
            )
        return self.outcome

    def part(self, step: int, rank: int, generation: int | None = None, **values: Any) -> Outcome:
        return self(
            PartWritten,
            generation=self.facts.lineage.generation if generation is None else generation,
            step=step,
            rank=rank,
            seconds=2.0,
            bytes=10,
            manifest=f"w{rank:05d}.parquet",
            digest="d",
            **values,
        )

    def parts(self, step: int) -> Outcome:
        for rank in range(self.plan.world_size):
            self.part(step, rank)
        return self.outcome

    def stored(self, step: int, slot: int = 1, generation: int | None = None) -> Stored:
        generation = self.facts.lineage.generation if generation is None else generation
        return Stored(slot=slot, step=step, generation=generation, term=1, path=f"checkpoints/{step}")

    def saved(self, step: int, slot: int = 1, generation: int | None = None, **values: Any) -> Outcome:
        return self(CheckpointCommitted, stored=self.stored(step, slot, generation), **values)


@pytest.fixture
def play() -> Iterator[Play]:
    """Sharded over all workers: nothing is held twice. In the end the journal folds to the state."""
    play = Play(replace(simulated_policy(replicas=1, max_steps=20, max_failures=3), standby=0))
    yield play
    assert fold(play.journal, play.policy) == play.state


@pytest.fixture
def real() -> Iterator[Play]:
    """Under the planner of a data-parallel run with 16 micro-batches a step."""
    batch = Batch(global_size=16, micro_size=1)
    spec = RunSpec(name="r", storage_path="/r", batch=batch, max_steps=1, min_workers=1, max_workers=4)
    policy = simulated_policy(max_steps=20, max_failures=3)
    play = Play(replace(policy, plan=planner_for(spec), standby=0))
    yield play
    assert fold(play.journal, play.policy) == play.state


@pytest.fixture
def replicated() -> Iterator[Play]:
    """Two replicas where the number of workers allows it."""
    play = Play(replace(simulated_policy(replicas=2, max_steps=20, max_failures=3), standby=0))
    yield play
    assert fold(play.journal, play.policy) == play.state
