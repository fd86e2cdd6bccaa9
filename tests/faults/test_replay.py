"""A pipeline without replicas or peer memory loses a stage: it is replayed from what its neighbour logged."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_train.cluster.driver.result import Result
from elastic_train.config import BoundaryLogs, Checkpoints, Parallelism
from elastic_train.control.events import WorkerLost
from elastic_train.control.fault_schedule import FaultSchedule, KillRank, Moment
from tests.faults.conftest import WHOLE, Runs, assert_same_training

pytestmark = [pytest.mark.ring4, pytest.mark.timeout(600), pytest.mark.matrix]
NODES, CPUS = 3, 1
STEPS = 22


def trained(runs: Runs, name: str, *faults: KillRank, **changes: Any) -> Result:
    """With one worker for each replay, unless said otherwise."""
    given = {"boundary_logs": BoundaryLogs(replayers=1)} | changes
    return runs.disturbed(
        name,
        FaultSchedule(faults=faults, seed=0),
        workers="2:2",
        max_steps=STEPS,
        standby=1,
        checkpoints=Checkpoints(every=8, peers=None, pressure="wait", keep=2),
        parallelism=Parallelism(pp=2),
        timing=WHOLE,
        **given,
    )


@pytest.fixture(scope="module")
def calm(runs: Runs) -> Result:
    """The same pipeline, undisturbed."""
    return trained(runs, "calm")


def formed(result: Result) -> list[tuple[str, int, tuple[str, ...]]]:
    """Source, step and workers of each group."""
    return [(r.formed.source, r.formed.step, r.formed.workers) for r in result.records if r.formed]


def assert_equal_to_the_bit(rough: Result, calm: Result) -> None:
    assert rough.outcome == "finished"
    assert [(e.step, e.ids_digest, e.loss) for e in rough.ledger.kept] == [
        (e.step, e.ids_digest, e.loss) for e in calm.ledger.kept
    ]


def test_a_lost_stage_is_replayed_and_no_step_is_lost(runs: Runs, calm: Result) -> None:
    """Before the first checkpoint from the seed, after it from there; then the other stage, whose log of what
    it received was made again by the replay."""
    rough = trained(
        runs,
        "replayed",
        KillRank(when=Moment(step=5, phase="backward"), rank=1),
        KillRank(when=Moment(step=13, phase="optimizer"), rank=1),
        KillRank(when=Moment(step=15, phase="forward"), rank=0),
    )
    assert_equal_to_the_bit(rough, calm)
    assert rough.ledger.superseded == ()
    groups = formed(rough)
    assert [(source, step) for source, step, _ in groups] == [
        ("fresh", 0),
        ("replay", 4),
        ("replay", 13),
        ("replay", 14),
    ]
    lost = [r.event.worker for r in rough.records if isinstance(r.event, WorkerLost)]
    first, second, third, fourth = (workers for _, _, workers in groups)
    assert lost[:3] == [first[1], second[1], third[0]], "nobody else ended"
    assert first[0] == second[0] == third[0], "the survivor keeps its process and its stage"
    assert third[1] == fourth[1]
    reasons = [r.reason for r in rough.records if r.formed]
    assert "stage 1 is replayed from step 0" in reasons[1]
    assert "stage 1 is replayed from step 8" in reasons[2]
    assert "stage 0 is replayed from step 8" in reasons[3]


def test_a_replay_that_loses_its_worker_begins_again(runs: Runs, calm: Result) -> None:
    rough = trained(
        runs,
        "again",
        KillRank(when=Moment(step=13, phase="backward"), rank=1),
        KillRank(when=Moment(step=11, phase="replay"), rank=1),
    )
    assert_equal_to_the_bit(rough, calm)
    assert rough.ledger.superseded == ()
    assert [(source, step) for source, step, _ in formed(rough)] == [
        ("fresh", 0),
        ("replay", 12),
        ("replay", 12),
    ]
    assert sum(isinstance(r.event, WorkerLost) for r in rough.records) == 2


def test_survivors_share_the_replay_and_each_stage_can_be_lost_in_turn(runs: Runs, calm: Result) -> None:
    """The newcomer and the survivor, by halves; the log that they made between them serves the next one."""
    rough = trained(
        runs,
        "shared",
        KillRank(when=Moment(step=13, phase="optimizer"), rank=1),
        KillRank(when=Moment(step=15, phase="forward"), rank=0),
        boundary_logs=BoundaryLogs(),
    )
    assert_same_training(rough, {e.step: (e.ids_digest, e.loss) for e in calm.ledger.kept})
    assert rough.ledger.superseded == ()
    assert [(source, step) for source, step, _ in formed(rough)] == [
        ("fresh", 0),
        ("replay", 13),
        ("replay", 14),
    ]
    assert rough.ledger.losses != calm.ledger.losses, "two halves are summed: the last bits are others"


def test_a_gap_in_the_log_means_the_last_checkpoint(runs: Runs, calm: Result) -> None:
    """Room for two steps of what is sent."""
    rough = trained(
        runs,
        "gap",
        KillRank(when=Moment(step=13, phase="backward"), rank=1),
        boundary_logs=BoundaryLogs(memory_bytes=1 << 18, disk_bytes=0),
    )
    assert_equal_to_the_bit(rough, calm)
    assert [(source, step) for source, step, _ in formed(rough)] == [("fresh", 0), ("storage", 8)]
    assert [e.step for e in rough.ledger.superseded] == [9, 10, 11, 12]
