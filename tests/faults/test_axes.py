"""Kills against plans that cut the state, over dp_shard, tp and pp, as a person asks for them.

A replica saves every step; without one peer memory does, or the last checkpoint.
"""

from __future__ import annotations

import pytest

from elastic_train.config import Checkpoints, Parallelism
from elastic_train.control.fault_schedule import Fault, FaultSchedule, KillNode, KillRank, Moment
from tests.faults.conftest import WHOLE, Runs, assert_same_training

pytestmark = [pytest.mark.ring4, pytest.mark.timeout(600)]
NODES, CPUS = 2, 2
STEPS = 16


def test_stages_cut_over_tp_go_on_after_the_loss_of_one_rank(runs: Runs) -> None:
    schedule = FaultSchedule(faults=(KillRank(when=Moment(step=8, phase="backward"), rank=0),), seed=1)
    rough = runs.disturbed(
        "tp-pp",
        schedule,
        workers="4:4",
        max_steps=STEPS,
        standby=0,
        checkpoints=Checkpoints(every=5, keep=2),
        parallelism=Parallelism(tp=2, pp=2),
        timing=WHOLE,
    )
    assert_same_training(rough, runs.calm(steps=STEPS))
    formed = [(r.formed.mesh, r.formed.source) for r in rough.records if r.formed is not None]
    assert formed[0] == ("pp 2 x tp 2", "fresh")
    # No survivor holds the lost part: it comes from peer memory or a log, or all of the state from storage.
    assert formed[1] in [("pp 2 x tp 2", source) for source in ("mixed", "replay", "storage")]


@pytest.mark.matrix
def test_a_node_with_one_of_two_copies_is_lost_without_a_step(runs: Runs) -> None:
    schedule = FaultSchedule(faults=(KillNode(when=Moment(step=6, phase="forward"), node="n1"),), seed=2)
    rough = runs.disturbed(
        "hybrid",
        schedule,
        workers="2:4",
        max_steps=STEPS,
        standby=0,
        parallelism=Parallelism(tp=2, pp=1, dp_shard=1),
        timing=WHOLE,
    )
    assert_same_training(rough, runs.calm(steps=STEPS))
    assert rough.ledger.superseded == ()
    meshes = [r.formed.mesh for r in rough.records if r.formed is not None]
    assert meshes == ["dp_replicate 2 x tp 2", "tp 2"]


@pytest.mark.parametrize(
    "fault",
    [
        KillRank(when=Moment(step=6, phase="reduce"), rank=0),
        pytest.param(KillNode(when=Moment(step=10, phase="optimizer"), node="n1"), marks=pytest.mark.matrix),
    ],
    ids=["rank", "node"],
)
def test_a_replicated_shard_survives_the_loss_of_a_rank_or_a_node(runs: Runs, fault: Fault) -> None:
    rough = runs.disturbed(
        f"hsdp-{type(fault).__name__}",
        FaultSchedule(faults=(fault,), seed=1),
        workers="2:4",
        max_steps=STEPS,
        standby=0,
        parallelism=Parallelism(dp_shard=2),
        timing=WHOLE,
    )
    assert_same_training(rough, runs.calm(steps=STEPS))
    assert rough.ledger.superseded == ()
    first, *then = [r.formed.mesh for r in rough.records if r.formed is not None]
    assert first == "dp_replicate 2 x dp_shard 2"
    # A new worker may be there before the rest have formed, on a slow machine.
    assert then
    assert set(then) <= {first, "dp_shard 2"}


@pytest.mark.matrix
def test_without_a_replica_or_peer_memory_the_last_checkpoint_is_restored(runs: Runs) -> None:
    schedule = FaultSchedule(faults=(KillRank(when=Moment(step=13, phase="backward"), rank=1),), seed=2)
    rough = runs.disturbed(
        "fsdp",
        schedule,
        workers="2:2",
        max_steps=STEPS,
        standby=0,
        checkpoints=Checkpoints(every=5, peers=None, pressure="wait", keep=2),
        parallelism=Parallelism(dp_replicate=1, dp_shard=2),
    )
    assert_same_training(rough, runs.calm(steps=STEPS))
    sources = [r.formed.source for r in rough.records if r.formed is not None]
    assert sources == ["fresh", "storage"]
    assert [e.step for e in rough.ledger.superseded] in ([11, 12], [6, 7, 8, 9, 10, 11, 12])
