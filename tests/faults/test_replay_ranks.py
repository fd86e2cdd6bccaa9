"""Stages of several ranks without replicas: what is lost of one is replayed by as many workers together."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_train.cluster.driver.result import Result
from elastic_train.config import BoundaryLogs, Checkpoints, Parallelism
from elastic_train.control.fault_schedule import FaultSchedule, KillRank, Moment
from elastic_train.train.profile import profiled_shape
from tests.faults.conftest import WHOLE, Runs, assert_same_training

pytestmark = [pytest.mark.ring4, pytest.mark.matrix, pytest.mark.timeout(600)]
NODES, CPUS = 3, 2
STEPS = 14


def trained(
    runs: Runs,
    name: str,
    parallelism: Parallelism,
    *faults: KillRank,
    workers: int = 4,
    standby: int = 1,
    **changes: Any,
) -> Result:
    return runs.disturbed(
        name,
        FaultSchedule(faults=faults, seed=0),
        workers=f"{workers}:{workers}",
        max_steps=STEPS,
        standby=standby,
        checkpoints=Checkpoints(every=6, peers=None, pressure="wait", keep=2),
        parallelism=parallelism,
        timing=WHOLE,
        **changes,
    )


@pytest.mark.parametrize(
    ("name", "parallelism", "standby"),
    [
        ("fsdp", Parallelism(pp=2, dp_shard=2), 1),
        ("tp", Parallelism(pp=2, tp=2), 0),
    ],
)
def test_a_rank_of_a_stage_is_lost_and_no_step_with_it(
    runs: Runs, name: str, parallelism: Parallelism, standby: int
) -> None:
    """What it held comes back from the log of the other stage, equal to the bit, beside what is left."""
    lost = KillRank(when=Moment(step=10, phase="backward"), rank=3)
    calm = trained(runs, f"{name}-calm", parallelism, standby=standby)
    rough = trained(runs, name, parallelism, lost, standby=standby)
    assert rough.outcome == "finished"
    assert [(e.step, e.ids_digest, e.loss) for e in rough.ledger.kept] == [
        (e.step, e.ids_digest, e.loss) for e in calm.ledger.kept
    ]
    assert rough.ledger.superseded == ()
    groups = [(r.formed.source, r.formed.step) for r in rough.records if r.formed]
    assert groups == [("fresh", 0), ("replay", 9)]


def test_a_budget_for_one_boundary_has_two_stages_replayed_together(runs: Runs) -> None:
    """The survivor of the two keeps what it holds; of the replay only the lost one's part is taken."""
    task, spec = runs.spec("shape", max_steps=STEPS)
    edge = 2 * spec.batch.micro_batches * profiled_shape(task, spec, flops_per_s=1e10).boundary_bytes * 6
    rough = trained(
        runs,
        "budget",
        Parallelism(pp=3),
        KillRank(when=Moment(step=10, phase="backward"), rank=0),
        workers=3,
        boundary_logs=BoundaryLogs(budget_bytes=edge),
    )
    assert_same_training(rough, runs.calm(steps=STEPS))
    assert rough.ledger.superseded == ()
    formed = [r.formed for r in rough.records if r.formed]
    assert [(f.source, f.step) for f in formed] == [("fresh", 0), ("replay", 9)]
    (pair,) = [group for group in formed[0].groups if group[1] - group[0] == 2]
    assert formed[1].groups == formed[0].groups
    reasons = [r.reason for r in rough.records if r.formed]
    if pair == (0, 2):
        assert "stages 0 to 1 are replayed from step 6" in reasons[1]
    else:
        assert "stage 0 is replayed from step 6" in reasons[1]
