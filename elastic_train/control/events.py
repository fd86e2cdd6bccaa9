"""Events of a run. Every event carries `at`, seconds on the controller's own clock."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_train.control.causes import Cause
from elastic_train.recovery.evidence import Commitment, LocalState, PeerSnapshot, Stored
from elastic_train.recovery.replayable_steps import Sent


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A machine: its id, how many workers fit on it, and its failure domain (rack or zone)."""

    name: str
    slots: int
    domain: str = ""
    drain_by: float | None = None  # controller time by which it must be left; None: it stays


# -- facts of the cluster, never fenced ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TermBegan:
    """A controller took the run: the first event of each term.

    `stored` is the newest valid checkpoint of the commit log, `kept` are that and those it descends from,
    oldest first. `ever_stored` tells whether the log ever held one. `again`: the controller's process was
    restarted; else a person submitted the run.
    """

    at: float
    term: int
    stored: Stored | None
    ever_stored: bool
    finished: bool = False
    again: bool = False
    kept: tuple[Commitment, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesChanged:
    """The nodes that are there now, draining ones included. Workers of a node that is missing are lost."""

    at: float
    nodes: tuple[Node, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReady:
    """A worker process is up: imported, connected, able to take a rank. `pid` is for people."""

    at: float
    worker: str
    node: str
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LacksRoom:
    """A worker can't come up, since others hold what it needs on its node: `holders`, for people."""

    at: float
    worker: str
    holders: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalHeldUp:
    """What was decided can't be written down for now: it waits in memory."""

    at: float
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalDurable:
    """What waited is written down: the storage of the run answers again."""

    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLost:
    """A worker process is gone, or is given up."""

    at: float
    worker: str
    cause: Cause


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopted:
    """After a controller restart: what the living workers say of themselves. Others are lost.

    `running` names (worker, node, generation it runs, its step); generation 0 means idle. `silent` workers
    have a process that gave no answer: those that were starting go on doing so, others are ended.
    """

    at: float
    running: tuple[tuple[str, str, int, int], ...]
    silent: tuple[str, ...] = ()


# -- reports of workers, fenced by generation ----------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReady:
    """Every rank holds its verified state; the group waits for Go."""

    at: float
    generation: int
    step: int
    seconds: float  # from Form to here
    transfer_s: float = 0.0  # of that, until the last rank had fetched and proved its state
    near_bytes: int = 0  # of that state, from memory of the rank's own node
    far_bytes: int = 0  # from memory of other nodes
    by_module: bool | None = None  # how initial values were given, where any were
    parts: tuple[tuple[str, float], ...] = ()  # of `seconds`, in order: what they went to
    late: int = 0  # ranks that are given their state beside the first step, which the others compute
    computed: int = 0  # micro-batches of the first step whose gradients ranks have since before a failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """The next group is made ready beside the one of `generation`, which trains: preparation `number`."""

    at: float
    generation: int
    number: int
    seconds: float  # that it took


@dataclass(frozen=True, slots=True, kw_only=True)
class NotPrepared:
    """Preparation `number` beside the group of `generation` did not come about. Training goes on."""

    at: float
    generation: int
    number: int
    cause: Cause


@dataclass(frozen=True, slots=True, kw_only=True)
class PeersReported:
    """What peer memory holds, said by the peer stores that could be reached after `generation` ended."""

    at: float
    generation: int
    snapshots: tuple[PeerSnapshot, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRead:
    """The newest checkpoint of the commit log, None if there never was one; or why that is not known.

    `kept` are that and those it descends from, oldest first.
    """

    at: float
    stored: Stored | None = None
    problem: str = ""
    kept: tuple[Commitment, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCommitted:
    """The vote of a step passed, seen by a survivor. Repeated and late ones are harmless."""

    at: float
    generation: int
    step: int
    loss: float
    tokens: float
    grad_norm: float
    skipped: bool
    seconds: float
    vote: tuple[float, ...]
    metrics: tuple[tuple[str, float], ...] = ()
    ids_digest: int = 0  # of the sample ids that the ranks consumed, order-free
    rates: tuple[float, ...] = ()  # the learning rate of each parameter group in this step
    last: bool = False  # the job's own loop ended the run with this step


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupBroken:
    """The first sign that a generation cannot go on."""

    at: float
    generation: int
    worker: str
    cause: Cause


@dataclass(frozen=True, slots=True, kw_only=True)
class Hung:
    """A generation stands still. `worker` holds it up, "" where nobody stands out.

    `stacks` are the Python stacks of the members that answered, by worker.
    """

    at: float
    generation: int
    worker: str
    cause: Cause
    stacks: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggling:
    """A rank has been slower than its peers for several steps; a factor below 1 says that it is over."""

    at: float
    generation: int
    worker: str
    node: str
    rank: int
    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalReport:
    """A worker's final report on a generation: it stopped at a step boundary and holds this, and nothing
    else.

    `error` is what ended its own training thread, None after a pause or the last step. A worker that is told
    to abort a generation it never joined answers too, with what it holds.
    """

    at: float
    generation: int
    worker: str
    local_states: tuple[LocalState, ...]
    error: Cause | None = None
    logs: tuple[Sent, ...] = ()  # what it keeps for the replay of other stages


@dataclass(frozen=True, slots=True, kw_only=True)
class PartWritten:
    """One rank's share of a checkpoint is durable."""

    at: float
    generation: int
    step: int
    rank: int
    seconds: float
    bytes: int
    manifest: str  # part manifest's path, relative to the checkpoint's directory
    digest: str  # of the part manifest's bytes
    state_digest: int = 0  # this part's share of the digest of the whole state
    metrics: tuple[tuple[str, float], ...] = ()  # of the step, which may be known sooner than its report


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveFailed:
    """One rank could not write its share, or the commit failed. Training goes on."""

    at: float
    generation: int
    step: int
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PeersHeld:
    """What the peer store of a node says of its snapshots from time to time. Sizes are bytes.

    `every` is how many steps lay between two of them of late, `cost_s` what one takes from training.
    """

    at: float
    node: str
    step: int
    every: float
    cost_s: float = 0.0
    own: int  # of segments for this node's workers
    copies: int  # held for another node, in an object store of `room`
    room: int
    spilled: int  # that Ray moved from memory to disk on this node since the peer store began


# -- facts of storage, durable, never fenced -----------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointCommitted:
    at: float
    stored: Stored
    metrics: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRejected:
    """A committed checkpoint turned out damaged on reading; `fallback` is the next sound one."""

    at: float
    stored: Stored
    problem: str
    fallback: Stored | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerFailed:
    """A fault of the controller itself: the run ends with its message."""

    at: float
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FencedOff:
    """A newer term owns the run: this controller must end itself."""

    at: float
    by_term: int


# -- people and time -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested:
    """The run is to end with a checkpoint; said again, at once, unless who says it is `patient`."""

    at: float
    reason: str
    patient: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequested:
    at: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultInjected:
    """A person breaks something on purpose: `what` is done to these nodes or workers at about this time."""

    at: float
    what: str
    nodes: tuple[str, ...] = ()
    workers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time passes. Deadlines are judged here and nowhere else.

    `late` is by how much the controller's own clockwork missed this tick: it stood still for so long, and so
    nobody's silence in that time counts. `moved_s` is for how long no member of the group was seen to move,
    which is to enter a phase or a micro-batch of training or evaluation. A member that forms a group moves
    while it is inside the job's own code. None: nobody looks.
    """

    at: float
    late: float = 0.0
    moved_s: float | None = None


Event = (
    TermBegan
    | NodesChanged
    | WorkerReady
    | LacksRoom
    | JournalHeldUp
    | JournalDurable
    | WorkerLost
    | Adopted
    | GroupReady
    | Prepared
    | NotPrepared
    | PeersReported
    | LogRead
    | StepCommitted
    | GroupBroken
    | Hung
    | Straggling
    | FinalReport
    | PartWritten
    | SaveFailed
    | PeersHeld
    | CheckpointCommitted
    | CheckpointRejected
    | ControllerFailed
    | FencedOff
    | StopRequested
    | SaveRequested
    | FaultInjected
    | Tick
)
