"""The state of a run: the facts that outlive every phase, and the phase.

Times are seconds on the controller's clock. A new term's clock starts anew; the first event of the term moves
them over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from elastic_train.control.changes import Change
from elastic_train.control.commands import Command, RunOutcome
from elastic_train.control.events import Cause, Node, PartWritten, PeersHeld
from elastic_train.planner.goodput_model import StepPace
from elastic_train.planner.plan import Plan
from elastic_train.recovery.evidence import Commitment, LocalState, Origin, PeerSnapshot, Stored, Vote
from elastic_train.recovery.lineage import Lineage
from elastic_train.recovery.replayable_steps import Sent


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """A worker process that was started and not yet lost or stopped."""

    name: str
    node: str
    status: Literal["starting", "ready"]
    since: float  # of the status
    proven: bool = False  # it took part in a committed step
    lacks_room: bool = False  # it is starting, and others hold what it needs


@dataclass(frozen=True, slots=True, kw_only=True)
class Flaps:
    """Workers of one node that ended before they were of use, and the quarantine that follows."""

    node: str
    ends: tuple[float, ...] = ()
    quarantines: int = 0
    until: float = 0.0
    slow: bool = False  # left because of its speed: its workers are well


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A checkpoint on its way: the parts that are durable, and whether its commit was ordered, and when."""

    generation: int
    step: int
    parts: tuple[PartWritten, ...] = ()  # by rank
    committing: bool = False
    since: float = 0.0  # of the first order
    ordered: float = 0.0  # the last one
    orders: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """The end of a group, from its first sign on: everything that was heard to have caused it, in any order.

    `generation` is the last group that it ended: one that was forming from the survivors of the first is
    ended by the same incident. `members` belonged to the first.
    """

    generation: int
    members: tuple[str, ...]
    causes: tuple[Cause, ...]
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """Storage does not do what it is asked to: since when, how often in a row, and what it said last.

    `blocked` is since when the run cannot go on, or cannot end, without it.
    """

    since: float
    last: float
    times: int
    problem: str
    blocked: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsaved:
    """Checkpoints that could not be written since the last one that was: how many, since when, the newest."""

    times: int
    since: float
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Paced:
    """What steps took under one kind of plan, as a mean of the last ones; `steps` were counted."""

    pace: StepPace
    steps: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """Nodes and workers, and which of them are avoided."""

    nodes: tuple[Node, ...] = ()
    workers: tuple[Worker, ...] = ()  # in the order they were started
    born: int = 0  # workers ever named
    flaps: tuple[Flaps, ...] = ()
    rests_until: float = 0.0  # no worker is started before, so that another run has the room
    slow: tuple[tuple[str, float], ...] = ()  # workers that are slower than their peers, and how much
    evicted: tuple[str, ...] = ()  # nodes that are left because they are slow, until the next group trains


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedLineage:
    """Which generations led to the present state, and which of its steps are known to be committed."""

    generation: int = 0  # the newest; events of older ones are fenced
    chain: Lineage = ()
    plans: tuple[tuple[int, Plan], ...] = ()  # of generations that somebody may hold state of
    step: int = 0  # newest step known to be committed in the lineage
    reported: int = 0  # newest step whose report arrived; the step may be known earlier, by other means
    seen: tuple[int, Vote] | None = None  # the last vote reported, and its generation
    ended: int | None = None  # the step with which the job's own loop ended the run, short of the last
    by_module: bool | None = None  # how initial values were given: each module alone, or all at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Survived:
    """State in the memory of workers that do not train and of peer stores, and which of it is not used."""

    local_states: tuple[tuple[str, tuple[LocalState, ...]], ...] = ()  # of workers that do not train
    logs: tuple[tuple[str, tuple[Sent, ...]], ...] = ()  # step logs of the same workers
    unreplayed: int = 0  # the newest generation whose step logs turned out to be wrong
    snapshots: tuple[PeerSnapshot, ...] | None = None  # in peer memory; None: not asked since the last group
    asking: bool = False  # the peer stores, since `asked_at`
    asked_at: float = 0.0
    suspect: tuple[int, int] | None = None  # what this generation and older ones saved after this step


@dataclass(frozen=True, slots=True, kw_only=True)
class Saves:
    """Checkpoints: committed, on their way, and asked for; and trouble of the storage that takes them."""

    stored: Stored | None = None  # the newest of the lineage
    ever_stored: bool = False
    logged: Stored | None = None  # the commit log's newest, not of the lineage, until workers are adopted
    commitments: tuple[Commitment, ...] = ()  # oldest first
    unsure: bool = False  # a commit that had no answer may have come true, beyond `stored`
    reading: float | None = None  # since when the log is read for that
    attempts: tuple[Attempt, ...] = ()  # those ordered to commit, and at most two that collect parts
    metrics: tuple[tuple[int, tuple[tuple[str, float], ...]], ...] = ()  # of the last steps
    asked: float | None = None  # when a checkpoint was last asked for, where control asks
    final_tries: int = 0  # at the last step's checkpoint
    trouble: Trouble | None = None  # of storage, while it lasts
    unsaved: Unsaved | None = None  # checkpoints that failed since the last one that did not


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """What failed, and what of it counts against the run's budgets."""

    incidents: tuple[Incident, ...] = ()  # since a later group committed a step
    count: int = 0  # of these that count
    ever: int = 0
    uncovered: int = 0  # failures after which storage was read, or nothing was left
    repeated: tuple[int, int] = (0, 0)  # the step of the last failure, and how many in a row were at it
    last_step: int = 0  # the newest step at which the run ever failed
    partial: tuple[int, int] | None = None  # generation and step that not all of its ranks have a part in
    deterministic: tuple[Cause, ...] = ()  # engine and memory causes, until a step beyond that one
    not_finite: tuple[int, int] | None = None  # the row of steps without a finite loss up to the newest
    restarts: int = 0  # of the controller without a committed step between them
    preemptions: int = 0  # interruptions by machines that were taken away, with or without notice
    exceeded: tuple[tuple[Plan, int], ...] = ()  # plans that a device's memory was too small for, and peaks


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """What steps, saves and switches took, in seconds where nothing else is said."""

    began: float | None = None  # when the first group trained
    step_s: float = 0.0  # the last step
    quiet_step_s: float | None = None  # a step while no checkpoint is written
    paced: tuple[Paced, ...] = ()  # by the kind of plan, the present one last
    save_s: float | None = None  # the slowest part of the last checkpoint
    save_cost_s: float | None = None  # by how much steps were longer while the last one was written
    saving_s: float | None = None  # the same of the one that is being written, so far
    switch_s: float = 0.0  # that the last graceful switch stood still, beside the step that it did
    formed_s: float = 0.0  # the last group, from its order to its go
    first_s: float = 0.0  # its first step
    planned_s: float | None = None  # a step of the newest plan, by the planner's own rates
    resized: float | None = None  # when the last growth or drain was done
    reconfigurations: int = 0
    moving_bytes: float = 0.0  # that the worker which receives most of the newest plan's state receives
    transfer_s: float = 0.0  # what that took
    peer_memory: tuple[PeersHeld, ...] = ()  # what peer stores last reported, one entry a node


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known, whatever the run is doing."""

    term: int = 0
    stopping: str | None = None  # why the run ends as soon as its newest step is saved
    stops_as: RunOutcome = "stopped"
    membership: Membership = field(default_factory=Membership)
    lineage: CommittedLineage = field(default_factory=CommittedLineage)
    survived: Survived = field(default_factory=Survived)
    saves: Saves = field(default_factory=Saves)
    failures: Failures = field(default_factory=Failures)
    measured: Measurements = field(default_factory=Measurements)


# -- phases ------------------------------------------------------------------------------------------


Purpose = Literal["grow", "shrink", "rebalance", "drain", "stop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Declined:
    """A change that was not worth its cost: with whom it would have been made, and whom for, by factors."""

    idle: tuple[str, ...]
    slow: tuple[tuple[str, float], ...] = ()
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """The next group, which is made ready while the present one trains, so that its pause only swaps.

    `number` tells apart those of one generation, which would be `generation`. It holds for those that were
    ready and those that were leaving when it was decided, and is forgotten once that changes.
    """

    generation: int
    number: int
    plan: Plan
    moved: float  # as of a Planned
    step_s: float | None = None  # the same
    purpose: Purpose
    reason: str
    since: float
    present: tuple[str, ...]
    leaving: tuple[str, ...]
    asked: Declined | None = None  # of a growth or other shares
    took: float | None = None  # once it is ready


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Wait for enough workers. `prompt`: form at once with those that are ready, to use state in memory."""

    since: float
    prompt: bool = False
    paused: float | None = None  # when a graceful switch began
    prepared: Preparation | None = None
    problem: str = ""  # why the planner refused the workers that are there


@dataclass(frozen=True, slots=True, kw_only=True)
class Forming:
    plan: Plan
    origin: Origin
    holders: tuple[str, ...]
    since: float
    paused: float | None = None
    prepared: int = 0  # the number of the preparation that it takes up


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    plan: Plan
    since: float
    proven: bool = False  # this generation committed a step
    stands: float | None = None  # since when training stands still, before the first step after a switch
    told: int = 1  # how often it was told to train
    declined: Declined | None = None  # the last one of this group
    preparation: Preparation | None = None
    preparations: int = 0  # beside this group, so far
    unprepared: tuple[str, ...] | None = None  # who was ready when one failed
    final_since: float = 0.0  # after the last step: when its checkpoint was last asked for or heard of
    final_failed: float | None = None  # when writing it failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Pausing:
    """The group stops at its next step boundary."""

    plan: Plan
    since: float
    purpose: Purpose
    reason: str
    save: bool = False  # with a checkpoint
    told: int = 1  # how often it was asked to
    settled: tuple[str, ...] = ()
    heard: float = 0.0  # when the group last said something
    stands: float = 0.0  # when it last committed a step
    unsaved: float | None = None  # when its checkpoint could not be written
    prepared: Preparation | None = None  # the group to go over to
    broken: bool = False  # the group is over, while its checkpoint, which is whole, is being committed


@dataclass(frozen=True, slots=True, kw_only=True)
class Settling:
    """The group is over; its living members' final reports come in."""

    plan: Plan
    since: float
    pending: tuple[str, ...]
    causes: tuple[Cause, ...]  # as they arrived
    formed: bool = True  # the group had trained or was ready to


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    outcome: RunOutcome
    detail: str
    cause: Cause | None = None
    worker: str = ""


Phase = Waiting | Forming | Running | Pausing | Settling | Ended


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    facts: Facts = field(default_factory=Facts)
    phase: Phase = field(default_factory=lambda: Waiting(since=0.0))
    now: float = 0.0  # when the state was reached


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a transition decided, and why, in one sentence; `planned` is the planner's part of it, `cadence`
    why a checkpoint is due. `change` says what it meant for the run, where it was not its usual course.
    """

    state: State
    commands: tuple[Command, ...] = ()
    reason: str = ""
    planned: str = ""
    cadence: str = ""
    change: Change | None = None

    def then(self, follow: Callable[[State], Outcome]) -> Outcome:
        """This, and what follows from the state it led to."""
        further = follow(self.state)
        if further.state is self.state and not further.commands and not further.reason:
            return self
        return Outcome(
            state=further.state,
            commands=self.commands + further.commands,
            reason="; ".join(part for part in (self.reason, further.reason) if part),
            planned=further.planned or self.planned,
            cadence=further.cadence or self.cadence,
        )


def members(phase: Phase) -> tuple[str, ...]:
    """The workers of the group that the phase is about: its ranks, and while it forms those that serve it."""
    match phase:
        case Forming(plan=plan, holders=holders):
            return tuple(dict.fromkeys((*plan.workers, *holders)))
        case Running(plan=plan) | Pausing(plan=plan):
            return plan.workers
        case Settling(pending=pending):
            return pending
        case Waiting() | Ended():
            return ()
