"""Failures while a failure is answered: each starts the choice again from the evidence that is left."""

from __future__ import annotations

import pytest

from elastic_train.config import Checkpoints
from elastic_train.control.events import TermBegan, WorkerLost
from elastic_train.control.fault_schedule import FaultSchedule, KillController, KillRank, Moment
from tests.faults.conftest import Runs, assert_copies_and_logs_spare_every_step, assert_same_training
from tests.faults.test_matrix import PLANS

pytestmark = [pytest.mark.ring4, pytest.mark.matrix, pytest.mark.timeout(600)]
NODES, CPUS = 3, 2
STEPS = 20

SCHEDULE = FaultSchedule(
    faults=(
        KillRank(when=Moment(step=8, phase="backward"), rank=1),
        KillRank(when=Moment(step=6, phase="forming"), rank=0),  # the group that should go on from there
        KillRank(when=Moment(step=8, phase="reduce"), rank=1),  # its first step, or one of those run again
        KillController(when=Moment(step=14)),
        KillRank(when=Moment(step=14, phase="backward"), rank=0),
    ),
    seed=0,
)


@pytest.mark.parametrize("plan", PLANS)
def test_failures_during_a_recovery_and_without_a_controller_leave_the_losses(runs: Runs, plan: str) -> None:
    chosen = PLANS[plan]
    rough = runs.disturbed(
        f"{plan}-double",
        SCHEDULE,
        workers=f"{chosen.ranks}:{chosen.ranks}",
        max_steps=STEPS,
        standby=2,
        parallelism=chosen.parallelism,
    )
    assert_same_training(rough, runs.calm(steps=STEPS))
    assert_copies_and_logs_spare_every_step(rough)
    lost = sum(isinstance(r.event, WorkerLost) for r in rough.records)
    assert lost in (3, 4), "every kill was felt; a new controller finds one that died without it, as it comes"
    assert sum(isinstance(r.event, TermBegan) for r in rough.records) == 2


def test_what_a_lone_rank_did_without_a_controller_is_known_from_whoever_keeps_its_state(runs: Runs) -> None:
    """The rank is dead before another controller is there to hear of its steps."""
    rough = runs.disturbed(
        "lone",
        FaultSchedule(
            faults=(
                KillController(when=Moment(step=4)),
                KillRank(when=Moment(step=13, phase="forward"), rank=0),
            ),
            seed=0,
        ),
        workers="1:1",
        max_steps=STEPS,
        standby=1,
        checkpoints=Checkpoints(every=5, peers=1, keep=2),
    )
    assert_same_training(rough, runs.calm(steps=STEPS))
    assert sum(isinstance(r.event, TermBegan) for r in rough.records) == 2
