"""A checkpoint turns out to be damaged while storage is in trouble, or is deleted meanwhile: one event."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from elastic_train.cluster.controller import performer as performer_module
from elastic_train.cluster.controller.committer import Committer
from elastic_train.cluster.controller.effects import Effects, Lane
from elastic_train.cluster.controller.inbox import Inbox
from elastic_train.cluster.controller.liveness_watch import WorkerWatch
from elastic_train.cluster.controller.node_roster import Roster
from elastic_train.cluster.controller.performer import Performer
from elastic_train.cluster.controller.run_context import RunContext
from elastic_train.config import Batch, RunSpec
from elastic_train.control.commands import Form
from elastic_train.control.events import CheckpointRejected, Event, GroupBroken
from elastic_train.errors import CheckpointDeleted, ChecksumMismatch, StorageUnavailable
from elastic_train.planner.plan import Mesh, Plan
from elastic_train.recovery.evidence import Fresh, FromStorage, Live, Stored

pytestmark = pytest.mark.ring1
NEWEST = Stored(slot=2, step=10, generation=1, term=1, path="checkpoints/step-10")
PLAN = Plan(mesh=Mesh(), workers=("w0001",), nodes=("a",), shares=((0,),))
FORM = Form(generation=2, plan=PLAN, origin=FromStorage(stored=NEWEST), lineage=((1, 0), (2, 10)))


def told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looked_up: Exception, form: Form = FORM
) -> tuple[Event | None, list[str]]:
    """What forming a group ends in whose members find their checkpoint damaged; and faults of ours."""
    spec = RunSpec(
        name="run",
        storage_path=str(tmp_path),
        batch=Batch(global_size=4, micro_size=1),
        max_steps=19,
        min_workers=1,
        max_workers=1,
    )
    faults: list[str] = []
    effects = Effects(fault=lambda what, error: faults.append(f"{what}: {error}"))
    inbox = Inbox()
    committer = Committer(spec, "me", inbox.post, effects)
    committer.take_over()
    performer = Performer(
        RunContext(run="r", term=1, spec=spec, controller=None, environment={}),
        inbox=inbox,
        watch=WorkerWatch(spec, inbox.post, inbox.now),
        committer=committer,
        effects=effects,
        roster=Roster(lambda: []),
        ended=lambda end: None,
    )

    def damaged(*_: object) -> None:
        raise ChecksumMismatch(url=NEWEST.path, problem="w00000.bin holds other bytes")

    def looks(stored: Stored) -> None:
        raise looked_up

    monkeypatch.setattr(performer_module, "form", damaged)
    monkeypatch.setattr(performer._store, "address", lambda: ("127.0.0.1", 1))
    monkeypatch.setattr(performer.peer_stores, "ensure", lambda nodes: None)
    monkeypatch.setattr(committer._run, "before", looks)
    performer.perform(form)
    try:
        return inbox.next(60.0), faults
    finally:
        effects.close(*Lane)


def test_trouble_while_an_older_one_is_looked_up_is_trouble_of_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trouble = StorageUnavailable(path="s3://b/commits", operation="read", problem="SlowDown: 503")
    event, faults = told(tmp_path, monkeypatch, trouble)
    assert isinstance(event, GroupBroken)
    assert (event.cause.kind, event.generation) == ("storage", 2)
    assert faults == []


def test_one_that_was_deleted_meanwhile_has_no_older_one_that_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = CheckpointDeleted(url="checkpoints/step-8", problem="it was deleted")
    event, faults = told(tmp_path, monkeypatch, gone)
    assert isinstance(event, CheckpointRejected)
    assert (event.stored, event.fallback) == (NEWEST, None)
    assert "w00000.bin" in event.problem
    assert faults == []


def test_what_a_job_begins_with_has_no_older_one_and_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = AssertionError("nothing was committed")
    event, faults = told(tmp_path, monkeypatch, never, replace(FORM, origin=Fresh()))
    assert isinstance(event, GroupBroken)
    assert (event.cause.kind, event.cause.phase) == ("user", "configuration")
    assert "w00000.bin" in event.cause.detail
    assert faults == []


def test_damage_in_the_memory_of_survivors_counts_since_nothing_older_is_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = AssertionError("no checkpoint was read")
    event, faults = told(tmp_path, monkeypatch, never, replace(FORM, origin=Live(generation=1, step=12)))
    assert isinstance(event, GroupBroken)
    assert (event.cause.kind, event.generation) == ("engine", 2)
    assert "w00000.bin" in event.cause.detail
    assert faults == []
