"""Every error this library raises on purpose.

ElasticTrainError
|-- ConfigError               a person asked for something that cannot be
|   `-- DataMismatch          the data set is not the one the run was started with
|-- UserCodeError             the job's own code raised; never retried
|   `-- NotFinite             its loss or gradient was not finite for too many steps in a row
|-- SampleFailed              a data set raised, in a loader process, what cannot travel as it is
|-- LoaderLost                a loader process died
|-- InfrastructureError       machines failed more often than the budget allows
|   |-- ClusterNotStarted     no Ray cluster came up on this machine
|   `-- HeadLost              the head of the Ray cluster is gone
|-- CapacityTimeout           the workers that the run needs did not come in time
|-- GroupBroken               a collective failed or was aborted: this generation of the group is over
|-- StateMismatch             after a restore the ranks do not hold the state they should
|-- ReplicasDiffer            ranks that should hold the same bits don't
|-- UndoRefused               a step cannot be run backwards without guessing; nothing was changed
|-- MemoryTooSmall            what is to be kept in memory does not fit
|-- DeviceMemoryExceeded      a step, or what it begins with, does not fit into a device's memory
|-- DeviceFailed              a device gives a process nothing but errors any more
|-- StorageError              a storage operation failed after its retries
|   |-- StorageUnavailable    trouble that may pass: no answer, throttling, credentials that ended
|   |-- StorageNotFound       nothing at that path
|   `-- AlreadyExists         a conditional create lost
|-- LeaseHeld                 another controller owns the run
|-- Fenced                    a newer term owns the run; this writer must end itself
`-- CheckpointError           a checkpoint cannot be used
    |-- NoCheckpoint          the run committed before and nothing loadable is left
    |-- CheckpointDeleted     its run deleted it, maybe while it was read: a newer one is committed
    |-- FragmentMissing       the manifest names bytes that are not there, or no fragment covers a box
    |-- Malformed             what it says of itself can't be true
    |-- OutsideOfCheckpoint   it names a file that doesn't lie in it, nor where the caller allowed
    |-- ChecksumMismatch      the bytes are there and are not the ones written
    |-- FormatUnsupported     a version or a required feature this release does not know
    `-- TensorMismatch        shapes, dtypes or names differ between the state and the model

An error is data plus one sentence: what happened, to what, and what to do next.
Every error pickles by its fields, so it crosses actor boundaries intact.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

REMEDIES = (
    (
        "signal only works in main thread",
        "The job's code runs in a thread of its worker, which can't handle signals. The remedy: a time-out "
        "of the library that is waited for, or a subprocess.",
    ),
    (
        "There is no current event loop in thread",
        "The job's code runs in a thread of its worker, which has no event loop. The remedy: "
        "asyncio.run(...), or asyncio.set_event_loop(asyncio.new_event_loop()) before.",
    ),
)
"""By a sign in what the job's own code raised: why it does so in a worker, and what to do."""


def _rebuild(cls: type[ElasticTrainError], values: dict[str, Any]) -> ElasticTrainError:
    return cls(**values)


@dataclass(kw_only=True, eq=False)
class ElasticTrainError(Exception):
    """Base of every error raised on purpose. A traceback ends with where its entry is."""

    def __post_init__(self) -> None:
        self.add_note(f"see docs/errors.md#{self.entry}")

    @property
    def entry(self) -> str:
        """The anchor in docs/errors.md that says what happened, why, and what to do."""
        return type(self).__name__.lower()

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), {f.name: getattr(self, f.name) for f in fields(self)})


@dataclass(kw_only=True, eq=False)
class ConfigError(ElasticTrainError):
    field: str
    problem: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.field}: {self.problem}" + (f" {self.remedy}" if self.remedy else "")


@dataclass(kw_only=True, eq=False)
class DataMismatch(ConfigError):
    """The data set's length or fingerprint differs from the one the run recorded."""


@dataclass(kw_only=True, eq=False)
class UserCodeError(ElasticTrainError):
    worker: str
    rank: int
    node: str
    step: int
    phase: str
    error: str  # type and message, one line
    traceback: str  # the user's own, as text

    def __str__(self) -> str:
        said = f"{self.traceback.rstrip()}\n\nThe job's own code raised {self.error}"
        known = "".join(f" {remedy}" for sign, remedy in REMEDIES if sign in self.error)
        if self.rank < 0:
            where = f"on {self.worker}" if not self.node else f"on {self.worker} (node {self.node})"
            return f"{said} {where} while {self.phase}. Fix it and start the run again.{known}"
        return (
            f"{said} on rank {self.rank} (node {self.node}) in {self.phase} of step {self.step}. The run "
            "stopped; fix the code and start it again under the same name to go on from the last "
            f"checkpoint.{known}"
        )


@dataclass(kw_only=True, eq=False)
class NotFinite(UserCodeError):
    """Too many steps in a row had no finite loss and gradient. `error` says which."""

    def __str__(self) -> str:
        return (
            f"{self.error}. The state is that of the last finite step. Look for the cause in the data, the "
            "loss or the learning rate, and start the run again under the same name; Limits(not_finite=...) "
            "says how many such steps are allowed."
        )


@dataclass(kw_only=True, eq=False)
class SampleFailed(ElasticTrainError):
    error: str  # type and message, one line
    traceback: str  # the user's own, as text

    def __str__(self) -> str:
        return f"{self.traceback.rstrip()}\n\nThe data set raised {self.error} in a loader process."


@dataclass(kw_only=True, eq=False)
class LoaderLost(ElasticTrainError):
    pid: int
    exitcode: int  # negative: the signal that ended it

    def __str__(self) -> str:
        return (
            f"loader process {self.pid} ended with exit code {self.exitcode}. -9 is mostly the kernel out of "
            "memory: use fewer loader workers or smaller samples."
        )


@dataclass(kw_only=True, eq=False)
class InfrastructureError(ElasticTrainError):
    cause: str

    def __str__(self) -> str:
        return f"{self.cause}. Start the run again under the same name to go on from its last checkpoint."


@dataclass(kw_only=True, eq=False)
class ClusterNotStarted(InfrastructureError):
    """Ray did not start on this machine. `cause` is what it said."""

    def __str__(self) -> str:
        return (
            f"no Ray cluster came up on this machine: {self.cause.rstrip('.')}. Whatever had begun is ended. "
            "Start the run again once the machine has processors and memory to spare, with fewer "
            "local_nodes, or on a cluster by address or RAY_ADDRESS."
        )


@dataclass(kw_only=True, eq=False)
class HeadLost(InfrastructureError):
    """Nobody answers at the address of the Ray cluster's head. Ray ends this process soon."""

    cause: str = ""
    address: str
    silent_s: float

    def __str__(self) -> str:
        return (
            f"the head of the Ray cluster, {self.address}, has not answered for {self.silent_s:.0f} s: it is "
            "gone, and its cluster with it. Start a cluster, and the run again under the same name: it goes "
            "on from its last checkpoint."
        )


@dataclass(kw_only=True, eq=False)
class CapacityTimeout(ElasticTrainError):
    needed: int
    present: int
    waited_s: float
    detail: str = ""

    def __str__(self) -> str:
        what = self.detail or (
            f"waited {self.waited_s:.0f} s for {self.needed} workers, the cluster offers {self.present}"
        )
        return f"{what}. Add nodes or lower the minimum of num_workers, then start the run again."


@dataclass(kw_only=True, eq=False)
class GroupBroken(ElasticTrainError):
    generation: int
    reason: str

    def __str__(self) -> str:
        return f"generation {self.generation} is over: {self.reason}"


@dataclass(kw_only=True, eq=False)
class StateMismatch(ElasticTrainError):
    step: int
    detail: str

    def __str__(self) -> str:
        return (
            f"the restored state of step {self.step} is not the one that was kept: {self.detail}. It is not "
            "trained on. `elastic-train ckpt verify` says whether the run's checkpoints are sound; the same "
            "command goes on from the newest that is. If that happens again on one node, suspect its memory."
        )


@dataclass(kw_only=True, eq=False)
class MemoryTooSmall(ElasticTrainError):
    what: str
    where: str
    needed: int  # bytes
    free: int  # bytes

    def __str__(self) -> str:
        return (
            f"{self.what} of the state need {self.needed / 1e6:,.1f} MB in {self.where}, which has "
            f"{self.free / 1e6:,.1f} MB. Give it more memory, use more nodes, or turn snapshots off with "
            "Checkpoints(peers=None)."
        )


@dataclass(kw_only=True, eq=False)
class DeviceMemoryExceeded(ElasticTrainError):
    """Torch's own error of a device's memory, which it `said`, with the peak that was measured."""

    device: str
    said: str
    peak: int  # bytes that tensors took at the most
    room: int  # bytes of the device

    def __str__(self) -> str:
        return (
            f"{self.said} Tensors took {self.peak:,} of the {self.room:,} bytes of {self.device} at the "
            "most. A plan that needs less is tried where there is one; smaller micro-batches need less too."
        )


@dataclass(kw_only=True, eq=False)
class DeviceFailed(ElasticTrainError):
    """Torch's own error of a device, which it `said`: the process that met it has lost the device."""

    device: str
    said: str

    def __str__(self) -> str:
        return f"{self.device} failed, so its worker ends and others go on: {self.said}"


@dataclass(kw_only=True, eq=False)
class ReplicasDiffer(ElasticTrainError):
    """Ranks that should hold the same bits don't. `wrong` are outvoted, of `doubtful` nobody can tell."""

    step: int
    agreed: int
    wrong: tuple[str, ...]
    doubtful: tuple[str, ...]

    def __str__(self) -> str:
        found = [f"{name} holds other bits than its replicas" for name in self.wrong]
        if self.doubtful:
            found.append(f"{' and '.join(self.doubtful)} differ, and nothing tells which is wrong")
        said = "; ".join(found)
        return (
            f"silent corruption at step {self.step}: {said}. At step {self.agreed} they agreed. The run goes "
            "back to what was saved by then; if the same node is named again, take it out of the cluster."
        )


@dataclass(kw_only=True, eq=False)
class UndoRefused(ElasticTrainError):
    optimizer: str
    tensor: str  # empty where the optimizer itself is to blame
    reason: str

    def __str__(self) -> str:
        of = f" of {self.tensor}" if self.tensor else ""
        return (
            f"the last step of {self.optimizer}{of} cannot be undone: {self.reason}. "
            "Nothing was changed; go back to an older state."
        )


@dataclass(kw_only=True, eq=False)
class StorageError(ElasticTrainError):
    path: str
    operation: str
    problem: str

    def __str__(self) -> str:
        return f"cannot {self.operation} {self.path}: {self.problem}"


@dataclass(kw_only=True, eq=False)
class StorageUnavailable(StorageError):
    """Trouble that may pass, and did not while it was tried again. Nothing is known of what lies there."""


@dataclass(kw_only=True, eq=False)
class StorageNotFound(StorageError):
    """Nothing is at that path."""


@dataclass(kw_only=True, eq=False)
class AlreadyExists(StorageError):
    """A conditional create found the name taken."""


@dataclass(kw_only=True, eq=False)
class LeaseHeld(ElasticTrainError):
    run: str
    holder: str
    age_s: float
    detail: str = ""  # where nobody watched whether it is renewed

    def __str__(self) -> str:
        if self.detail:
            return f"run {self.run} is held by {self.holder}. {self.detail}"
        return (
            f"run {self.run} is already active: {self.holder} renewed its lease {self.age_s:.0f} s ago. "
            "Wait for it, stop it with `elastic-train stop`, or choose another run name."
        )


@dataclass(kw_only=True, eq=False)
class Fenced(ElasticTrainError):
    run: str
    term: int
    by_term: int

    def __str__(self) -> str:
        return (
            f"term {self.term} of run {self.run} is over: term {self.by_term} owns the run now. Nothing was "
            f"changed; `elastic-train logs -f {self.run}` follows it, and `elastic-train stop` ends it."
        )


@dataclass(kw_only=True, eq=False)
class CheckpointError(ElasticTrainError):
    url: str
    problem: str

    def __str__(self) -> str:
        return f"checkpoint {self.url}: {self.problem}"


@dataclass(kw_only=True, eq=False)
class NoCheckpoint(CheckpointError):
    """The run has a history, and nothing of it can be loaded."""


@dataclass(kw_only=True, eq=False)
class CheckpointDeleted(CheckpointError):
    """Its run no longer keeps it; a newer one was committed before it was deleted."""


@dataclass(kw_only=True, eq=False)
class FragmentMissing(CheckpointError):
    """Bytes that the manifest names are absent, or a box is covered by no fragment."""


@dataclass(kw_only=True, eq=False)
class ChecksumMismatch(CheckpointError):
    """The bytes are there and are not the ones written."""


@dataclass(kw_only=True, eq=False)
class FormatUnsupported(CheckpointError):
    """A format version or required feature that this release does not know."""


@dataclass(kw_only=True, eq=False)
class TensorMismatch(CheckpointError):
    """Names, shapes or dtypes of the checkpoint and the model differ; the problem lists them."""


@dataclass(kw_only=True, eq=False)
class Malformed(CheckpointError):
    """A manifest, state file, index or record whose types, sizes or names can't be true."""


@dataclass(kw_only=True, eq=False)
class OutsideOfCheckpoint(CheckpointError):
    """A file that a checkpoint names lies neither in it nor under a root that the caller allowed."""
