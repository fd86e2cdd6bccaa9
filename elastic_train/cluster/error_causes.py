"""Map an exception to a cause: its kind, and where it arose."""

from __future__ import annotations

import re
import traceback

from ray.exceptions import ActorDiedError, OutOfMemoryError, RayError, RayTaskError

from elastic_train.cluster.messages import Heartbeat
from elastic_train.control.events import Cause
from elastic_train.errors import (
    CheckpointError,
    ConfigError,
    DeviceFailed,
    DeviceMemoryExceeded,
    ElasticTrainError,
    Fenced,
    GroupBroken,
    LoaderLost,
    MemoryTooSmall,
    ReplicasDiffer,
    SampleFailed,
    StorageError,
    UserCodeError,
)
from elastic_train.train.rank_assignment import WorkerProgress


def cause_of(
    error: BaseException, *, node: str = "", at: WorkerProgress | None = None, phase: str = ""
) -> Cause:
    """The cause that an error is, with where the member was `at` when it arose."""
    step, rank = (at.step, at.rank) if at is not None else (0, -1)
    phase = phase or (at.phase if at is not None else "starting")
    if isinstance(error, RayTaskError) and isinstance(error.cause, ElasticTrainError | MemoryError):
        error = error.cause  # it crossed an actor's border
    line = f"{type(error).__name__}: {error}".splitlines()[0][:500]
    match error:
        case UserCodeError():
            return Cause(
                kind="user",
                detail=error.error,
                phase=error.phase,
                step=error.step,
                rank=rank,
                node=node,
                traceback=error.traceback,
            )
        case SampleFailed():  # the job's own, too, where it does not pickle
            return Cause(
                kind="user",
                detail=error.error,
                phase=phase,
                step=step,
                rank=rank,
                node=node,
                traceback=error.traceback,
            )
        case ConfigError():  # found by a worker, but a person's to mend
            return Cause(
                kind="user", detail=str(error), phase="configuration", step=step, rank=rank, node=node
            )
        case GroupBroken(reason=reason):
            return Cause(
                kind="collective", detail=_plain(reason), phase=phase, step=step, rank=rank, node=node
            )
        case ReplicasDiffer(agreed=agreed):
            return Cause(
                kind="corruption",
                detail=str(error),
                phase=phase,
                step=step,
                rank=rank,
                node=node,
                trusted=agreed,
            )
        case RayError():  # a holder died while it was read from
            return Cause(kind="collective", detail=line, phase=phase, step=step, rank=rank, node=node)
        case StorageError() | Fenced():
            return Cause(kind="storage", detail=line, phase=phase, step=step, rank=rank, node=node)
        case CheckpointError():
            return Cause(kind="damage", detail=line, phase=phase, step=step, rank=rank, node=node)
        case DeviceMemoryExceeded(peak=peak):
            return Cause(kind="memory", detail=line, phase=phase, step=step, rank=rank, node=node, peak=peak)
        case MemoryError() | MemoryTooSmall():
            return Cause(kind="memory", detail=line, phase=phase, step=step, rank=rank, node=node)
        case LoaderLost():  # mostly by its machine's memory
            return Cause(kind="death", detail=line, phase=phase, step=step, rank=rank, node=node)
        case _:  # where a device failed, the job's own code may have asked for what it cannot do
            return Cause(
                kind="death" if isinstance(error, DeviceFailed) else "engine",
                detail=line,
                phase=phase,
                step=step,
                rank=rank,
                node=node,
                traceback=traceback_text(error),
            )


def death_of(worker: str, error: RayError | None, last: Heartbeat | None) -> Cause:
    """Why a worker's process is gone: Ray's words, and its last heartbeat's, as SIGKILL gives no reason."""
    lines = [line.strip() for line in str(error or "").splitlines() if line.strip()]
    said = lines[0][:300] if lines else "it ended"
    step, rank, node = (last.step, last.rank, last.node) if last is not None else (0, -1, "")
    phase = last.phase if last is not None else "starting"
    if isinstance(error, OutOfMemoryError):
        return Cause(kind="memory", detail=f"{worker}: {said}", phase=phase, step=step, rank=rank, node=node)
    if last is not None and last.memory.short:
        detail = f"{worker} (rank {rank}) was killed at step {step}: {last.memory}"
        return Cause(kind="memory", detail=detail, phase=phase, step=step, rank=rank, node=node)
    preempted = isinstance(error, ActorDiedError) and bool(getattr(error, "preempted", False))
    return Cause(kind="preemption" if preempted else "death", detail=f"{worker}: {said}")


def traceback_text(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def _plain(reason: str) -> str:
    """A collective's error without the place in gloo's source and its advice."""
    return re.sub(r"\[\S+\.cc:\d+\] ", "", reason).split(". This is typically")[0]
