"""Commands of the controller. Each is idempotent; each effect, success or failure, ends in an event."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from elastic_train.control.events import Cause, PartWritten
from elastic_train.planner.plan import Plan
from elastic_train.recovery.evidence import Origin


@dataclass(frozen=True, slots=True, kw_only=True)
class StartWorker:
    """Start a worker process on a node. Ends in WorkerReady or WorkerLost."""

    worker: str
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StopWorker:
    """End a worker process; free if it is gone."""

    worker: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """Break the group's collectives on every worker that still lives.

    Each answers FinalReport; one that doesn't answer a ping within the verdict time becomes WorkerLost.
    """

    generation: int
    workers: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """Ask the group to stop at its next step boundary, saving first if `save`. Each answers FinalReport."""

    generation: int
    save: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepare:
    """Make the group of `generation` ready beside that of `beside`, which trains on from `step`.

    Its members meet and connect; newcomers build their model. Ends in Prepared or NotPrepared.
    """

    generation: int
    beside: int
    number: int
    plan: Plan
    step: int
    by_module: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Dismiss:
    """Forget a preparation, wherever it is: nothing of it is left in any of the workers. Number 0: any."""

    generation: int
    number: int
    workers: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """Form a group: rendezvous, build, transfer, verify. Ends in GroupReady, GroupBroken or
    CheckpointRejected.

    `lineage` lists (generation, step it started from), oldest first, this generation last. `holders` are the
    workers that serve fragments although they may get no rank (draining nodes). `replayed` is the plan whose
    lost stages the origin replays. `by_module` says how the run's initial values were given, if any were yet.
    `prepared` is the number of the preparation that made this group ready, 0 where none did. `step_s` and
    `switch_s` are what a step and the switch are taken to cost, where that is known: they are compared with
    what they took.
    """

    generation: int
    plan: Plan
    origin: Origin
    lineage: tuple[tuple[int, int], ...]
    holders: tuple[str, ...] = ()
    replayed: Plan | None = None
    by_module: bool | None = None
    prepared: int = 0
    step_s: float | None = None
    switch_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Go:
    """Let a ready group train."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """Ask the group for a checkpoint at its next step boundary."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """Make a whole checkpoint visible. Ends in CheckpointCommitted, SaveFailed or FencedOff."""

    generation: int
    step: int
    parts: tuple[PartWritten, ...]
    metrics: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Prune:
    """Delete every checkpoint of this run that is committed and not in `keep` (slots), and orphaned attempts.

    What is committed after the newest of `keep` stays: nobody knew of it when this was decided. Attempts of
    `in_flight` (generation, step) are left alone.
    """

    keep: tuple[int, ...]
    in_flight: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Forget:
    """A checkpoint of `step` is durable: what the group's members logged up to it is replayed no more."""

    generation: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AskPeers:
    """Ask the peer stores of all nodes what they hold. Ends in PeersReported, within the verdict time."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadLog:
    """Read which checkpoint is the newest of the commit log. Ends in LogRead."""


RunOutcome = Literal[
    "finished", "stopped", "user_error", "infrastructure", "capacity", "checkpoint", "fenced"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The run is over: stop every worker, record the outcome, release the lease (not when fenced)."""

    outcome: RunOutcome
    detail: str
    cause: Cause | None = None
    worker: str = ""


Command = (
    StartWorker
    | StopWorker
    | Abort
    | Pause
    | Prepare
    | Dismiss
    | Form
    | Go
    | Save
    | Commit
    | Prune
    | Forget
    | AskPeers
    | ReadLog
    | End
)
