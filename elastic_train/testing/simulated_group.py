"""Simulated workers and the group they train in: what each holds when the group breaks, and when."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, replace

from elastic_train.control.commands import Form
from elastic_train.control.events import StepCommitted
from elastic_train.control.fault_schedule import At
from elastic_train.recovery.evidence import Live, LocalState, Mixed, Vote

PHASE_AT: tuple[tuple[At, float], ...] = (
    ("forward", 0.1),
    ("backward", 0.4),
    ("reduce", 0.7),
    ("vote", 0.8),
    ("optimizer", 0.9),
)


FILLING_AT, FILLED_AT = 0.2, 0.6
"""When in its first step late members of a group are being filled, and when they are."""


@dataclass(slots=True)
class SimulatedNode:
    name: str
    slots: int
    alive: bool = True
    slow_s: float = 0.0  # that a step takes longer with it
    drain_by: float | None = None


@dataclass(slots=True)
class SimulatedWorker:
    """A worker process. It keeps the state of the group before until its own commits a step.

    `replayed` are lost stages that it brought back, `logs` the first step that its log of a generation has.
    """

    name: str
    node: str
    ready: bool = False
    died: float | None = None
    stopped_until: float = 0.0
    hung: bool = False  # its heartbeats go on
    lacks_room: bool = False  # it said so
    generation: int = 0  # of the group that it runs in
    local_states: dict[int, LocalState] = field(default_factory=dict[int, LocalState])
    replayed: dict[tuple[int, int], LocalState] = field(default_factory=dict[tuple[int, int], LocalState])
    logs: dict[int, int] = field(default_factory=dict[int, int])
    said_until: float = 0.0  # words leave in order
    settled: set[int] = field(default_factory=set[int])

    def all_held(self) -> tuple[LocalState, ...]:
        return (*self.local_states.values(), *self.replayed.values())

    def responds(self, now: float) -> bool:
        return self.died is None and self.ready and self.stopped_until <= now and not self.hung


def vote_of(step: int) -> Vote:
    """What the ranks agree on at a step: a function of the step alone."""
    return Vote(step=step, values=(1.0 / step, 1.0))


@dataclass(slots=True)
class SimulatedGroup:
    """All workers of one generation. `step` is what every rank committed, while nothing is broken."""

    form: Form
    workers: list[SimulatedWorker]
    step: int
    ready: bool = False
    training: bool = False
    broken: bool = False
    paused: bool = False
    phase: At = "forming"
    late: set[str] = field(default_factory=set[str])  # members that lack their state in the first step
    told: set[str] = field(default_factory=set[str])  # members that heard that they have to train
    pause: bool = False
    save: bool = False
    moved: float = 0.0  # when somebody was last seen to move
    busy_until: float = 0.0  # with the job's own code, which moves every `mark_s`
    mark_s: float = 0.0

    @property
    def generation(self) -> int:
        return self.form.generation

    def moved_s(self, now: float) -> float | None:
        """For how long nobody was seen to move; None where nothing runs."""
        if self.broken:
            return None
        if now < self.busy_until:
            return (now - self.moved) % self.mark_s if self.mark_s else 0.0
        return now - max(self.moved, self.busy_until)

    def fill(self) -> None:
        """Every rank has its verified state, or others have, who give it to late ones beside a step."""
        self.ready = True
        origin, mesh = self.form.origin, self.form.plan.mesh
        if isinstance(origin, Live | Mixed) and mesh.dp_replicate == mesh.size:
            whole = {w.name for w in self.workers if _holds(w, origin)}
            self.late = {w.name for w in self.workers} - whole if whole else set()
        self._hold(set(self.late))

    def arrive(self) -> None:
        """Late members have their state, unless the group broke before."""
        if self.broken:
            return
        late, self.late = self.late, set()
        self._hold({w.name for w in self.workers} - late)

    def _hold(self, others: set[str]) -> None:
        for rank, worker in enumerate(self.workers):
            if worker.name in others:
                continue
            held = isinstance(self.form.origin, Live | Mixed) and self.step
            applied = vote_of(self.step) if held else None
            worker.local_states[self.generation] = LocalState(
                generation=self.generation, rank=rank, step=self.step, applied=applied
            )

    def commit(self) -> None:
        """Every rank applies the step; what it held of older groups is freed."""
        for worker in self.workers:
            self._apply(worker)
        self.step += 1

    def shatter(self, draw: random.Random) -> bool:
        """The group breaks where it is. Whether some rank passed a vote that was on.

        A vote can only be passed if every rank entered it: then each rank either applied the step or kept its
        reduced gradient. Otherwise nobody passed.
        """
        self.broken = True
        if not (self.training and self.phase in ("vote", "optimizer")):
            return False
        entered = self.phase == "optimizer" or draw.random() < 0.7
        passed = False
        for worker in self.workers:
            if entered and (self.phase == "optimizer" or draw.random() < 0.5):
                self._apply(worker)
                passed = True
            elif entered or draw.random() < 0.5:
                held = worker.local_states[self.generation]
                worker.local_states[self.generation] = replace(held, reached=self.step + 1)
        return passed

    def _apply(self, worker: SimulatedWorker) -> None:
        """One rank applies the next step."""
        step = self.step + 1
        rank = worker.local_states[self.generation].rank
        worker.local_states = {
            self.generation: LocalState(
                generation=self.generation, rank=rank, step=step, applied=vote_of(step)
            )
        }
        worker.replayed = {}
        worker.logs = {g: first for g, first in worker.logs.items() if g == self.generation}


def _holds(worker: SimulatedWorker, origin: Live | Mixed) -> bool:
    held = worker.local_states.get(origin.generation)
    return held is not None and held.step == origin.step


def roll_forward(worker: SimulatedWorker, origin: Live | Mixed) -> None:
    """Bring a holder to the origin's step."""
    held = worker.local_states.get(origin.generation)
    if held is not None and held.step == origin.step - 1 and held.reached == origin.step:
        assert origin.vote is not None
        worker.local_states[origin.generation] = replace(
            held, step=origin.step, reached=None, applied=origin.vote
        )


FOREVER = math.inf


def committed(generation: int, step: int, seconds: float) -> StepCommitted:
    """What the first rank says of a step."""
    return StepCommitted(
        at=0.0,
        generation=generation,
        step=step,
        loss=1.0 / step,
        tokens=1000.0,
        grad_norm=1.0,
        skipped=False,
        seconds=seconds,
        vote=vote_of(step).values,
    )
