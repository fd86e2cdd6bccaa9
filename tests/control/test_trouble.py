"""Trouble of storage has an account of its own, in time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic_train.config import Checkpoints, Timing
from elastic_train.control.commands import Form, Save, StartWorker
from elastic_train.control.events import (
    Cause,
    FinalReport,
    JournalDurable,
    JournalHeldUp,
    SaveFailed,
    SaveRequested,
    WorkerLost,
)
from elastic_train.control.states import Ended, Forming, Running, Waiting
from elastic_train.control.storage_trouble import again_at
from elastic_train.recovery.evidence import FromStorage

pytestmark = pytest.mark.ring0


def restoring(play):
    """A run that can only go on from its checkpoint."""
    stored = play.stored(1000, slot=2, generation=1)
    play.policy = replace(play.policy, max_steps=2000)
    play.begin(3, stored=stored).ready()
    assert play.phase.origin == FromStorage(stored=stored)
    return play


def refuse(play, problem: str = "SlowDown: 503 (6 tries in 3.1 s)"):
    """Every member fails to read, in words of its own."""
    cause = Cause(kind="storage", detail=f"StorageError: {problem}", phase="forming")
    play.broken("", "storage", cause.detail)
    for number, worker in enumerate(play.plan.workers):
        error = replace(cause, detail=f"{cause.detail} {number}")
        play(
            FinalReport,
            generation=play.facts.lineage.generation,
            worker=worker,
            local_states=(),
            error=error,
        )


@pytest.mark.parametrize("problem", ["SlowDown: 503", "PermissionError: ExpiredToken", "ESTALE"])
def test_a_restore_waits_for_storage_and_no_machine_is_charged(play, problem):
    restoring(play)
    began, formed = play.at, 0
    while play.at - began < 100.0:
        if isinstance(play.phase, Forming):
            formed += 1
            refuse(play, problem)
        assert isinstance(play.phase, Waiting)
        play.wait(1.0)
    assert 4 <= formed <= 6, "it is asked later each time"
    while not isinstance(play.phase, Forming):
        play.wait(1.0)
    play.go()
    assert isinstance(play.phase, Running)
    assert (play.facts.failures.ever, play.facts.saves.trouble) == (0, None)


def test_a_run_that_is_held_up_by_storage_for_too_long_ends_and_says_so(play):
    restoring(play)
    began = play.at
    while not isinstance(play.phase, Ended):
        if isinstance(play.phase, Forming):
            refuse(play)
        play.wait(1.0)
    assert 120.0 < play.at - began < 190.0
    assert play.phase.outcome == "infrastructure"
    assert "the run cannot go on: storage failed for" in play.phase.detail
    assert "SlowDown: 503" in play.phase.detail


def test_by_default_trouble_of_storage_is_borne_for_a_quarter_of_an_hour():
    assert Timing().storage_trouble_s == 900.0


def test_waiting_for_storage_is_not_waiting_for_capacity(play):
    play.policy = replace(play.policy, timing=replace(play.policy.timing, wait_for_capacity_s=3.0))
    restoring(play)
    refuse(play)
    for _ in range(4):
        play.wait(1.0)
        assert isinstance(play.phase, Waiting)
    play.wait(2.0)
    assert isinstance(play.phase, Forming)


def test_storage_that_rests_for_another_reason_is_not_waiting_for_capacity_either(play):
    play.policy = replace(play.policy, timing=replace(play.policy.timing, wait_for_capacity_s=3.0))
    stored = play.stored(1000, slot=2, generation=1)
    play.policy = replace(play.policy, max_steps=2000)
    play.begin(3, stored=stored)
    play(JournalHeldUp, problem="storage has not answered for 11 s")
    assert play.facts.saves.trouble.blocked is None
    play.ready()
    for _ in range(4):
        play.wait(1.0)
        assert isinstance(play.phase, Waiting)
    assert play.facts.saves.trouble.blocked is not None, "the run can't go on"
    play.wait(2.0)
    assert isinstance(play.phase, Forming)


def test_memory_never_waits_for_storage(replicated):
    play = replicated.running(4, step=5)
    play(SaveFailed, generation=1, step=5, problem="503")
    play.lose("w0004")
    play.settle()
    assert isinstance(play.phase, Forming)


def test_a_death_beside_trouble_of_storage_is_a_failure(play):
    restoring(play)
    play.lose(play.plan.workers[0])
    refuse(play)
    assert play.facts.failures.count == 1
    assert play.facts.saves.trouble is not None


def test_the_words_of_all_ranks_are_one_time_that_storage_failed(play):
    play.running(3, step=5)
    for _ in range(3):
        play(SaveFailed, generation=1, step=5, problem="503")
    assert play.facts.saves.trouble.times == 1
    assert again_at(play.facts.saves.trouble) - play.facts.saves.trouble.last == 5.0


def test_saves_are_put_off_while_storage_fails(play):
    play.policy = replace(play.policy, max_steps=10_000, checkpoints=Checkpoints(every="auto"))
    play.running(2, step=3)
    saves, step = 0, 3
    for _ in range(400):
        play.at += 1.0
        step += 1
        play.step(step)
        if play.ordered(Save):
            saves += 1
            play(SaveFailed, generation=1, step=step, problem="503")
    assert isinstance(play.phase, Running), "a run that can train on trains on"
    assert 3 <= saves <= 8
    play(SaveRequested, reason="a person")
    assert play.ordered(Save)


def test_what_failed_long_ago_is_another_trouble(play):
    play.running(2, step=5)
    play(SaveFailed, generation=1, step=5, problem="503")
    began = play.facts.saves.trouble.since
    play.wait(200.0)
    play(SaveFailed, generation=1, step=5, problem="504")
    assert (play.facts.saves.trouble.times, play.facts.saves.trouble.since - began > 190.0) == (1, True)


def test_a_commit_ends_the_trouble(play):
    play.running(2, step=5)
    play(SaveFailed, generation=1, step=5, problem="503")
    play.parts(5)
    play.saved(5)
    assert play.facts.saves.trouble is None


def test_a_damaged_checkpoint_is_no_trouble_of_storage_that_is_waited_for(play):
    restoring(play)
    play.broken("", "damage", "checksum")
    play.settle()
    assert play.ordered(Form)
    assert (play.facts.failures.ever, play.facts.saves.trouble) == (0, None)


def no_start(play):
    name = next(w.name for w in play.facts.membership.workers if w.status == "starting")
    play(WorkerLost, worker=name, cause=Cause(kind="storage", detail="503 slow down", phase="starting"))


def test_starts_that_fail_by_storage_quarantine_no_node_and_end_a_run_in_time(play):
    play.begin(2)
    for _ in range(4):
        no_start(play)
    assert play.facts.membership.flaps == ()
    assert play.facts.saves.trouble is not None
    while not isinstance(play.phase, Ended):
        assert play.at < 1000.0
        play.wait(4.0)
        no_start(play)
    assert play.phase.outcome == "infrastructure"
    assert "no worker starts: storage failed for" in play.phase.detail


def test_a_group_that_trains_starts_nobody_while_storage_rests(play):
    play.running(2, step=3)
    play.nodes("abc")
    no_start(play)
    assert not play.ordered(StartWorker)
    play.wait(10.0)
    assert play.ordered(StartWorker)


def test_time_in_which_a_run_went_on_is_no_time_that_storage_held_it_up(replicated):
    """A restore failed; peer memory was found; an hour later the last save fails once."""
    play = replicated.running(4, step=5)
    play.lose("w0002")
    play.broken("", "storage", "503 slow down")
    play.settle()
    play.go()
    assert isinstance(play.phase, Running)
    assert play.facts.saves.trouble is not None
    assert play.facts.saves.trouble.blocked is None


def test_a_journal_that_cannot_be_written_is_trouble_of_storage_while_the_run_trains_on(play):
    play.running(3, step=2)
    play(JournalHeldUp, problem="storage has not answered for 11 s")
    assert play.outcome.change.kind == "storage_trouble"
    assert play.facts.saves.trouble.problem == "storage has not answered for 11 s"
    assert play.facts.saves.trouble.blocked is None
    assert isinstance(play.phase, Running)
    play(JournalDurable)
    assert (play.facts.saves.trouble, play.facts.failures.ever) == (None, 0)


def test_a_journal_that_is_written_does_not_end_what_a_restore_waits_for(play):
    refuse(restoring(play))
    blocked = play.facts.saves.trouble.blocked
    play(JournalHeldUp, problem="storage has not answered for 11 s")
    play(JournalDurable)
    assert blocked is not None
    assert play.facts.saves.trouble.blocked == blocked
