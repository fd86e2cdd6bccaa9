"""Reasons are for people: whatever they say, nothing but text changes."""

from __future__ import annotations

import random
from dataclasses import asdict, replace

import pytest

from elastic_train.control.events import GroupReady, StepCommitted
from elastic_train.control.fault_schedule import AddNode, DrainNode, KillController, KillNode, Moment, storm
from elastic_train.observe.goodput import goodput
from elastic_train.observe.journal_records import Record, from_json, to_json
from elastic_train.observe.ledger import ledger
from elastic_train.observe.reconfigurations import history
from elastic_train.observe.save_report import saving

pytestmark = pytest.mark.ring0


def reworded(records: list[Record], seed: int) -> list[Record]:
    """The same records, with each other's sentences."""
    sentences = [record.reason for record in records]
    random.Random(seed).shuffle(sentences)
    return [replace(record, reason=reason) for record, reason in zip(records, sentences, strict=True)]


def reported(records: list[Record]) -> object:
    changes = [asdict(change) for change in history(records)]
    return changes, ledger(records), goodput(records), saving({"checkpoints.every": "auto"}, records)


@pytest.mark.parametrize("seed", range(6))
def test_rewording_every_reason_changes_no_report(recorded, seed):
    faults = storm(seed, steps=15, nodes=("a", "b", "c", "d"), ranks=4, faults=4).faults
    records = recorded(*faults, seed=seed, replicas=1 + seed % 2)
    for other in range(3):
        assert reported(reworded(records, other)) == reported(records)
    assert reported([replace(record, reason="") for record in records]) == reported(records)


def test_changes_name_their_subjects_and_survive_the_journal(recorded):
    records = recorded(
        KillNode(when=Moment(step=4), node="c"),
        AddNode(when=Moment(step=8), node="e"),
        KillController(when=Moment(step=20)),
        DrainNode(when=Moment(step=25), node="a", notice_s=60.0),
        replicas=2,
        max_steps=40,
    )
    assert [from_json(to_json(record)) for record in records] == records
    found = {record.change.kind: record.change for record in records if record.change is not None}
    assert {"growth", "drain", "takeover"} <= set(found)
    assert found["growth"].workers
    assert found["growth"].before.startswith("dp")
    assert found["drain"].nodes == ("a",)
    named = {node for r in records if r.change is not None for node in r.change.nodes}
    assert "c" in named, "the node of an ordinary death is named"


def test_the_usual_course_of_a_run_is_no_change(recorded):
    quiet = [r for r in recorded() if isinstance(r.event, StepCommitted | GroupReady)]
    assert quiet
    assert all(record.change is None for record in quiet)
