"""Newcomers get their state while the others compute the first step; either side is lost meanwhile."""

from __future__ import annotations

import pytest

from elastic_train.config import Parallelism
from elastic_train.control.events import GroupReady, WorkerLost
from elastic_train.control.fault_schedule import BreakRank, FaultSchedule, KillRank, Moment
from tests.faults.conftest import Runs, assert_same_training

pytestmark = [pytest.mark.ring4, pytest.mark.timeout(600)]
NODES, CPUS = 3, 2
STEPS = 20

SCHEDULE = FaultSchedule(
    faults=(
        KillRank(when=Moment(step=5, phase="backward"), rank=1),
        KillRank(when=Moment(step=5, phase="filling"), rank=1),  # who took its place
        KillRank(when=Moment(step=9, phase="backward"), rank=2),
        BreakRank(when=Moment(step=9, phase="filling"), rank=2),
        KillRank(when=Moment(step=14, phase="backward"), rank=2),
        KillRank(when=Moment(step=14, phase="reduce"), rank=0),  # it has computed, and waits for the newcomer
    ),
    seed=0,
)


def test_a_loss_on_either_side_while_a_newcomer_is_filled_costs_no_step(runs: Runs) -> None:
    rough = runs.disturbed(
        "filling",
        SCHEDULE,
        workers="3:3",
        max_steps=STEPS,
        standby=2,
        parallelism=Parallelism(dp_shard=1),
    )
    assert_same_training(rough, runs.calm(steps=STEPS))
    assert rough.ledger.superseded == ()
    assert sum(isinstance(r.event, WorkerLost) for r in rough.records) == 5, "every kill was felt"
    assert len(list((runs.storage / "filling" / "chaos").iterdir())) == len(SCHEDULE.faults)


LATE_IN_A_STEP = FaultSchedule(
    faults=(
        KillRank(when=Moment(step=6, phase="backward", micro_batch=3), rank=1),  # the last of its four
        KillRank(when=Moment(step=12, phase="reduce"), rank=2),
    ),
    seed=0,
)


@pytest.mark.matrix
def test_what_survivors_computed_of_a_broken_step_is_not_run_again(runs: Runs) -> None:
    rough = runs.disturbed(
        "broken-step",
        LATE_IN_A_STEP,
        workers="3:3",
        max_steps=STEPS,
        global_size=24,
        standby=2,
        parallelism=Parallelism(dp_shard=1),
    )
    assert_same_training(rough, runs.calm(steps=STEPS, global_size=24))
    assert rough.ledger.superseded == ()
    ready = [r.event for r in rough.records if isinstance(r.event, GroupReady)]
    assert [event.step for event in ready] == [0, 5, 11]
    assert ready[0].computed == 0
    assert all(4 <= event.computed <= 8 for event in ready[1:]), "of the two survivors' eight of twelve"
