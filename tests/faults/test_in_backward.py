"""A rank is killed between two updates of a backward: its replica goes on, and no step is run differently."""

from __future__ import annotations

import pytest

from elastic_train.control.fault_schedule import FaultSchedule, KillRank, Moment
from elastic_train.testing.single_process_run import train_alone
from tests.faults.conftest import Runs, assert_same_training

pytestmark = [pytest.mark.ring4, pytest.mark.matrix, pytest.mark.timeout(400)]
NODES, CPUS = 2, 2
STEPS = 14

SCHEDULE = FaultSchedule(
    faults=(
        KillRank(when=Moment(step=4, phase="update"), rank=1),
        KillRank(when=Moment(step=8, phase="update"), rank=0),
        KillRank(when=Moment(step=11, phase="optimizer"), rank=1),
    ),
    seed=0,
)


def test_kills_between_updates_in_backward_leave_the_losses_as_they_were(runs: Runs) -> None:
    changes = {"clip_norm": None, "optimizer_in_backward": True}
    alone = train_alone(*runs.spec("calm", max_steps=STEPS, **changes))
    calm = {r.step: (r.ids_digest, r.loss) for r in alone}
    rough = runs.disturbed("early", SCHEDULE, max_steps=STEPS, standby=2, workers="2:2", **changes)
    print(rough.summary)
    assert_same_training(rough, calm)
