"""Kills against plans of tensor and pipeline parallelism, as a person asks for them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic_train.config import Checkpoints, Parallelism
from elastic_train.control.faults import FaultSchedule, KillNode, KillRank, Moment
from tests.faults.conftest import TIMING, Runs, assert_same_training

pytestmark = [pytest.mark.ring4, pytest.mark.timeout(600)]
NODES, CPUS = 2, 2
STEPS = 16
WHOLE = replace(TIMING, join_window_s=60.0)  # the first group waits for all four workers


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
    # No survivor holds the lost part: it comes out of peer memory, or all of the state out of storage.
    assert formed[1] in [("pp 2 x tp 2", "mixed"), ("pp 2 x tp 2", "storage")]


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
