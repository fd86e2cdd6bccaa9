"""A rank and a node are lost while storage refuses checkpoints: live recovery does not wait for it."""

from __future__ import annotations

import pytest

from elastic_train.control.events import StepCommitted
from elastic_train.control.fault_schedule import FailStorage, FaultSchedule, KillNode, KillRank, Moment
from tests.faults.conftest import Runs, assert_same_training

pytestmark = [pytest.mark.ring4, pytest.mark.matrix, pytest.mark.timeout(400)]
NODES, CPUS = 3, 1
STEPS = 24
DOWN_S = 20.0

SCHEDULE = FaultSchedule(
    faults=(
        FailStorage(when=Moment(step=6), seconds=DOWN_S),
        KillRank(when=Moment(step=9, phase="backward"), rank=1),
        KillNode(when=Moment(step=13, phase="forward"), node="n1"),
    ),
    seed=0,
)


def test_losses_while_storage_is_down_cost_no_step_and_wait_for_nothing(runs: Runs) -> None:
    calm = runs.calm(steps=STEPS)
    rough = runs.disturbed("down", SCHEDULE, max_steps=STEPS, workers="1:3")
    print(rough.summary)
    assert_same_training(rough, calm)
    assert rough.ledger.superseded == ()
    walls = {r.event.step: r.seconds for r in rough.records if isinstance(r.event, StepCommitted)}
    assert walls[14] - walls[5] < DOWN_S, "both losses were over before storage was back"
    assert rough.checkpoint is not None, "it was saved when storage was back"
