"""Why a worker's process is gone: as Ray says it, and as its last heartbeat does."""

from __future__ import annotations

from dataclasses import replace

import pytest
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    GetTimeoutError,
    OutOfMemoryError,
    RayTaskError,
)

from elastic_train.checkpoint.engine.machine_memory import MachineMemory, memory_now
from elastic_train.cluster.error_accounts import Account, account_of
from elastic_train.cluster.error_causes import cause_of, death_of
from elastic_train.cluster.messages import Heartbeat
from elastic_train.control.causes import CauseKind
from elastic_train.errors import (
    ChecksumMismatch,
    ConfigError,
    DeviceFailed,
    DeviceMemoryExceeded,
    ElasticTrainError,
    Fenced,
    GroupBroken,
    LoaderLost,
    ReplicasDiffer,
    SampleFailed,
    StateMismatch,
    StorageError,
    StorageUnavailable,
    UserCodeError,
)

pytestmark = pytest.mark.ring1
MB = 1 << 20
ROOMY = MachineMemory(held=480 * MB, used=500 * MB, room=2048 * MB)
LAST = Heartbeat(
    worker="w0002",
    node="n1",
    pid=7,
    generation=1,
    rank=1,
    step=3,
    phase="backward",
    micro_batch=0,
    phase_s=0.1,
    memory=ROOMY,
)


def test_a_process_that_was_killed_where_memory_was_short_likely_ran_out_of_it() -> None:
    full = replace(LAST, memory=MachineMemory(held=480 * MB, used=500 * MB, room=512 * MB))
    cause = death_of("w0002", ActorDiedError(), full)
    assert cause.kind == "memory"
    assert (cause.step, cause.rank, cause.node) == (3, 1, "n1")
    assert cause.detail == (
        "w0002 (rank 1) was killed at step 3: it held 480.0 MiB, "
        "and 500.0 MiB of 512.0 MiB were used where it ran"
    )


def test_what_ray_ended_for_memory_is_told_in_its_words() -> None:
    cause = death_of(
        "w0002", OutOfMemoryError("Task was killed due to the node running low on memory."), LAST
    )
    assert cause.kind == "memory"
    assert cause.detail == "w0002: Task was killed due to the node running low on memory."


@pytest.mark.parametrize("last", [LAST, None], ids=["heard", "unheard"])
def test_any_other_end_is_a_death(last: Heartbeat | None) -> None:
    assert death_of("w0002", ActorDiedError(), last).kind == "death"
    gone = death_of("w0002", ActorUnavailableError("the node is gone\nmore", None), last)
    assert gone.kind == "death"
    assert "\n" not in gone.detail
    assert death_of("w0002", None, last).detail == "w0002: it ended"


def test_what_a_loader_process_could_not_pickle_is_the_jobs_own() -> None:
    error = SampleFailed(error="Odd: cannot be pickled", traceback="in sample 3")
    cause = cause_of(error, node="n1", phase="forward")
    assert (cause.kind, account_of(error)) == ("user", "job")
    assert (cause.detail, cause.traceback) == ("Odd: cannot be pickled", "in sample 3")


ACCOUNTS: dict[CauseKind, Account] = {
    "user": "job",
    "storage": "storage",
    "damage": "storage",
    "engine": "ours",
    "collective": "machines",
    "death": "machines",
    "memory": "machines",
    "corruption": "machines",
}
RAISED: list[Exception] = [
    UserCodeError(worker="w", rank=0, node="n", step=1, phase="forward", error="E: e", traceback="t"),
    SampleFailed(error="Odd: cannot be pickled", traceback="in sample 3"),
    ConfigError(field="f", problem="p", remedy="r"),
    GroupBroken(generation=1, reason="connection reset by peer"),
    ReplicasDiffer(step=4, agreed=3, wrong=("rank 1",), doubtful=()),
    StorageError(path="p", operation="read", problem="503"),
    StorageUnavailable(path="p", operation="read", problem="503"),
    Fenced(run="r", term=1, by_term=2),
    ChecksumMismatch(url="u", problem="p"),
    MemoryError("no room"),
    LoaderLost(pid=7, exitcode=-9),
    DeviceMemoryExceeded(device="cuda", said="out of memory", peak=1, room=2),
    DeviceFailed(device="cuda", said="CUDA error: uncorrectable ECC error encountered"),
    StateMismatch(step=1, detail="d"),
    GetTimeoutError("late"),
    KeyError("ours"),
]


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("crossed", [False, True], ids=["here", "there"])
def test_whose_fault_an_error_is_is_one_answer_wherever_it_was_raised(
    error: Exception, *, crossed: bool
) -> None:
    raised = RayTaskError("call", "trace", error).as_instanceof_cause() if crossed else error
    if crossed and not isinstance(error, ElasticTrainError | MemoryError):
        assert cause_of(raised).kind == "collective", "somebody else's fault is told by that one"
        return
    assert ACCOUNTS[cause_of(raised).kind] == account_of(raised)
    assert cause_of(raised).kind == cause_of(error).kind


def test_a_process_knows_what_it_holds() -> None:
    before = memory_now()
    kept = bytearray(64 * MB)
    kept[:: 1 << 12] = b"x" * len(range(0, len(kept), 1 << 12))
    after = memory_now()
    assert after.held - before.held > 32 * MB
    assert 0 < after.used < after.room
