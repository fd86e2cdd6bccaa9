"""Messages between controller and workers beside events: small frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elastic_train.checkpoint.engine.machine_memory import MachineMemory
from elastic_train.checkpoint.snapshot import Snapshot
from elastic_train.control.events import StepCommitted
from elastic_train.geometry.fragments import Fragments
from elastic_train.recovery.evidence import PeerSnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Writing:
    """Somebody writes a checkpoint of a generation; `seconds` ago storage last took bytes of it."""

    generation: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """What a worker says of itself at every heartbeat and when it is adopted."""

    worker: str
    node: str
    pid: int
    generation: int  # the generation it runs or forms; 0: idle
    rank: int
    step: int
    phase: str
    micro_batch: int
    phase_s: float  # seconds it has been in this phase
    filled_bytes: int = 0  # of the `needed_bytes` of its new state that have come, while it takes a rank
    needed_bytes: int = 0
    user_code: bool = False  # inside the job's own code
    paced_step: int = 0  # the last step whose own part is done here
    own_s: float = 0.0  # seconds of it for each micro-batch: forward and backward, before waiting for others
    memory: MachineMemory
    writing: Writing | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A worker process is up. `address` is its node's IP."""

    worker: str
    node: str
    pid: int
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What a holder gives to the next generation: its boxes and the scalars of their step."""

    holds: Fragments
    document: Mapping[str, Any]
    undone: frozenset[str] = frozenset()  # tensors that are right up to the rounding of an undo
    steady: bool = False  # parameters and optimizer state stay as they are until a step's vote
    computed: tuple[int, ...] = ()  # micro-batches of the next step whose gradients the holder keeps


@dataclass(frozen=True, slots=True, kw_only=True)
class Filled:
    """A rank has its state. `digest` is of the whole state, equal on every rank; None where each rank
    compared what it was given with what the givers had.
    """

    digest: int | None
    step: int
    notes: tuple[str, ...] = ()  # differences a person should see, such as changed hyperparameters
    seconds: float = 0.0  # of fetching and proving it
    by_module: bool | None = None  # how its initial values were given, where it has any


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedSnapshot:
    """A whole snapshot in a slot of its node's segment, without its bytes, and what its worker says with it.

    `first`: of its generation, so that what older generations left may still be needed. `cost_s` is what a
    snapshot takes from training, as its worker has found so far.
    """

    worker: str
    snapshot: Snapshot
    first: bool
    cost_s: float = 0.0
    steps: tuple[StepCommitted, ...] = ()  # since the snapshot before: its rank may die before they are heard


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerReport:
    """What peer stores could serve now, and the steps that they know of, oldest first."""

    snapshots: tuple[PeerSnapshot, ...] = ()
    steps: tuple[StepCommitted, ...] = ()
