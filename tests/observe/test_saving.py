"""What `status` says of the cadence."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic_train.control.events import PeersHeld, StepCommitted
from elastic_train.observe.journal_records import FormedGroup, Record
from elastic_train.observe.save_report import saving

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
        replace(record("step 3 is committed"), cadence="the first after 60 s"),
        replace(record("step 9 is committed"), cadence="every 30 s, about 9 steps: each takes 1 s"),
        record("step 10 is committed"),
    ]
    reported = saving({"checkpoints.every": "auto", "checkpoints.peers": "auto"}, records)
    assert reported == (
        "checkpoints every 30 s, about 9 steps: each takes 1 s; peer memory as often as it costs 2% of the "
        "time at most, every step where it can"
    )


def test_what_a_person_configured_is_said_to_be_so() -> None:
    reported = saving({"checkpoints.every": 50, "checkpoints.peers": 1}, [])
    assert reported == "checkpoints every 50 steps, as configured; peer memory at every step, as configured"
    assert saving({}, []) == "checkpoints at an interval that is not measured yet; peer memory is not used"


def test_what_peer_stores_say_is_told_with_its_reason_and_its_size_and_a_lost_node_counts_no_more() -> None:
    formed = FormedGroup(
        generation=2,
        step=4,
        source="live",
        mesh="dp_shard 2",
        dp=2,
        workers=("w0", "w1"),
        nodes=("n0", "n1"),
    )

    def said(node: str, step: int) -> Record:
        held = PeersHeld(
            at=0.0,
            node=node,
            step=step,
            every=2.5,
            cost_s=0.04,
            own=3_000_000,
            copies=2_000_000,
            room=200_000_000,
            spilled=0,
        )
        return replace(record("n0 holds something"), event=held)

    records = [said("n9", 3), replace(record("formed"), formed=formed), said("n0", 5), said("n1", 7)]
    assert saving({"checkpoints.every": 9, "checkpoints.peers": "auto"}, records) == (
        "checkpoints every 9 steps, as configured; peer memory every 2.5 steps: a snapshot takes "
        "0.04 s from training, at most 2% of the time may go into that, so one is due every 2 s (6 MB of "
        "segments and 4 MB of copies in object stores of 400 MB on 2 nodes, 0 MB spilled to disk)"
    )
    assert "as configured, every 2.5 as measured (6 MB" in saving({"checkpoints.peers": 2}, records)
