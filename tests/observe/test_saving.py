"""What `status` says of the cadence."""

from __future__ import annotations

import pytest

from elastic_train.control.events import StepCommitted
from elastic_train.observe.records import Record
from elastic_train.observe.saving import saving

pytestmark = pytest.mark.ring0


def record(reason: str) -> Record:
    event = StepCommitted(
        at=0.0, generation=1, step=3, loss=1.0, tokens=1.0, grad_norm=1.0, skipped=False, seconds=1.0, vote=()
    )
    return Record(
        seq=0, wall="", event=event, reason=reason, phase="running", commands=(), formed=None, ended=None
    )


def test_the_reason_given_last_is_told() -> None:
    records = [
        record("step 3 is committed; a checkpoint is due, the first after 60 s"),
        record("step 9 is committed; a checkpoint is due, every 30 s, about 9 steps: each takes 1 s"),
        record("step 10 is committed"),
    ]
    told = saving({"checkpoints.every": "auto", "checkpoints.peers": "auto"}, records)
    assert told == (
        "checkpoints every 30 s, about 9 steps: each takes 1 s; peer memory as often as it costs 2 % of the "
        "time at most, every step where it can"
    )


def test_what_a_person_configured_is_said_to_be_so() -> None:
    told = saving({"checkpoints.every": 50, "checkpoints.peers": 1}, [])
    assert told == "checkpoints every 50 steps, as configured; peer memory at every step, as configured"
    assert saving({}, []) == "checkpoints at an interval that is not measured yet; peer memory is not used"
