"""A mixture of experts over ep, its positions divided over tp, goes on through kills."""

from __future__ import annotations

import dataclasses

import pytest

from elastic_train.config import Parallelism
from elastic_train.control.fault_schedule import FaultSchedule, KillRank, Moment
from tests.faults.conftest import WHOLE, Runs

pytestmark = [pytest.mark.ring4, pytest.mark.matrix, pytest.mark.timeout(600)]
NODES, CPUS = 2, 2
STEPS = 14

STORM = FaultSchedule(
    faults=(
        KillRank(when=Moment(step=4, phase="backward"), rank=1),
        KillRank(when=Moment(step=9, phase="reduce"), rank=2),
    ),
    seed=0,
)


def test_experts_and_positions_are_divided_again_after_each_loss(runs: Runs) -> None:
    task, spec = runs.spec(
        "experts",
        workers="4:4",
        standby=0,
        max_steps=STEPS,
        parallelism=Parallelism(tp=2, dp_shard=2, ep=2),
        timing=WHOLE,
    )
    rough = runs.compared(dataclasses.replace(task, size="tiny_moe"), spec, STORM)
    meshes = [r.formed.mesh for r in rough.records if r.formed is not None]
    assert meshes == ["dp_shard 2 x tp 2 x ep 2"] * 3
