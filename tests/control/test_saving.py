"""Checkpoints from parts to the commit: supersession, fencing, retention, lost answers, the last one."""

from __future__ import annotations

import pytest

from elastic_train.control.commands import Commit, End, Form, Go, Prune, ReadLog, Save
from elastic_train.control.events import (
    Adopted,
    LogRead,
    PeersHeld,
    SaveFailed,
    TermBegan,
)
from elastic_train.control.states import Ended, Running, Settling, Waiting
from elastic_train.recovery.evidence import Fresh

pytestmark = pytest.mark.ring0


def failed(play, step: int, generation: int | None = None):
    return play(
        SaveFailed,
        generation=generation or play.facts.lineage.generation,
        step=step,
        problem="503 slow down",
    )


def read(play) -> None:
    """Until the commit log is read."""
    while not play.ordered(ReadLog):
        assert play.at < 100.0
        play.wait(2.0)


def test_a_checkpoint_is_committed_once_when_every_part_is_durable(play):
    play.running(3, step=5)
    play.part(5, 0)
    play.part(5, 2)
    play.part(5, 2)
    assert play.commands == ()
    play.part(5, 1)
    (commit,) = play.ordered(Commit)
    assert [p.rank for p in commit.parts] == [0, 1, 2]
    assert commit.metrics == (("loss", 1.0),)
    play.part(5, 1)
    assert play.commands == ()


def test_a_commit_carries_the_metrics_of_its_own_step(play):
    play.running(2, step=4)
    play.step(5, loss=0.5, metrics=(("accuracy", 0.9),))
    play.step(6)
    play.parts(5)
    assert play.ordered(Commit)[0].metrics == (("loss", 0.5), ("accuracy", 0.9))


def test_a_newer_attempt_supersedes_an_incomplete_one_once_it_is_ordered(play):
    play.running(2, step=10)
    play.part(5, 0)
    play.part(10, 0)
    play.part(10, 1)
    assert play.ordered(Commit)[0].step == 10
    assert "too late" in play.part(5, 1).reason
    assert [a.step for a in play.facts.saves.attempts] == [10], "the incomplete one is dropped"


def test_a_rank_may_report_the_next_checkpoint_before_another_has_reported_this_one(play):
    """So that the checkpoint of a step which may be the best is not lost to the one after it."""
    play.running(2, step=10)
    play.part(5, 0)
    play.part(10, 0)
    play.part(5, 1)
    assert play.ordered(Commit)[0].step == 5
    play.part(10, 1)
    assert play.ordered(Commit)[0].step == 10


def test_two_attempts_of_a_generation_collect_parts_and_no_more(play):
    play.running(2, step=15)
    for step in (5, 10, 15):
        play.part(step, 0)
    assert [a.step for a in play.facts.saves.attempts] == [10, 15]


def test_an_older_step_is_not_committed_after_a_newer_one(play):
    """A run goes on from the newest record."""
    play.running(2, step=10)
    play.parts(10)
    assert play.ordered(Commit)[0].step == 10
    play.parts(5)
    assert play.commands == ()
    play.saved(10)
    assert [c.stored.step for c in play.facts.saves.commitments] == [10]


def test_parts_of_a_committed_step_come_too_late(play):
    play.running(2, step=5)
    play.parts(5)
    play.saved(5)
    before = play.state
    play.part(5, 0)
    assert play.state is before


def test_parts_outlive_their_group_while_their_step_is_of_the_lineage(replicated):
    play = replicated.running(4, step=6)
    for rank in range(3):
        play.part(5, rank)
    play.lose("w0001")
    play.settle()
    play.go()
    play.part(5, 3, generation=1)
    assert play.ordered(Commit)[0].step == 5


def test_parts_of_a_dead_generation_are_fenced(play):
    play.running(3, step=7)
    play.part(7, 0)
    play.lose("w0001")
    play.settle()
    assert play.facts.saves.attempts == ()
    before = play.state
    assert "fenced" in play.part(7, 1, generation=1).reason
    assert "fenced" in play.part(7, 1, generation=77).reason
    assert play.state is before


def test_a_failed_save_costs_nothing_but_itself(play):
    play.running(2, step=5)
    play.part(5, 0)
    assert "training goes on" in failed(play, 5).reason
    assert isinstance(play.phase, Running)
    play.step(6)
    play.parts(6)
    assert play.ordered(Commit)[0].step == 6


def test_what_peer_stores_say_is_kept_one_entry_a_node_and_orders_nothing(play):
    play.running(2, step=5)

    def say(node: str, step: int):
        sizes = {"own": 9_000, "copies": 1_000, "room": 50_000, "spilled": 0}
        return play(PeersHeld, node=node, step=step, every=1.0, cost_s=0.1, **sizes)

    assert "10,000 bytes" in say("n0", 3).reason
    assert not say("n1", 4).commands
    say("n0", 5)
    assert [(held.node, held.step) for held in play.facts.measured.peer_memory] == [("n1", 4), ("n0", 5)]


def test_retention_moves_after_the_commit_and_keeps_what_is_in_flight(play):
    play.running(2, step=12)
    play.parts(5)
    play.saved(5, slot=1)
    play.parts(8)
    play.saved(8, slot=2)
    play.parts(10)
    play.part(12, 0)
    play.saved(10, slot=3)
    assert play.ordered(Prune) == [Prune(keep=(2, 3), in_flight=((1, 12),))]


def test_a_commit_that_is_told_twice_is_known(play):
    play.running(2, step=5)
    play.parts(5)
    play.saved(5)
    before = play.state
    play.saved(5)
    assert play.state == before
    assert play.commands == ()


def test_a_commit_that_is_known_from_the_log_is_no_longer_on_its_way(play):
    play.running(2, step=5)
    play.parts(5)
    play(TermBegan, term=2, stored=play.stored(5), ever_stored=True)
    assert play.facts.saves.attempts == ()
    play(Adopted, running=(("w0001", "a", 1, 5), ("w0002", "b", 1, 5)))
    assert not play.ordered(Commit)


def test_a_commit_whose_successor_is_in_the_log_is_not_ordered_again(play):
    """The record of step 8 got through, its answer did not, and step 4 had none at all."""
    play.running(2, step=4)
    play.parts(4)
    play.step(8)
    play.parts(8)
    assert [a.step for a in play.facts.saves.attempts] == [4, 8]
    play(TermBegan, term=2, stored=play.stored(8), ever_stored=True, again=True)
    play(Adopted, running=(("w0001", "a", 1, 8), ("w0002", "b", 1, 8)))
    assert not play.ordered(Commit), "the newest record stays that of the newest step"


def test_a_run_does_not_start_afresh_while_a_commit_may_have_come_true(play):
    play.running(3, step=7)
    play.parts(7)
    play.lose("w0001")
    play.settle()
    failed(play, 7)
    assert not play.ordered(ReadLog), "storage rests"
    read(play)
    play(LogRead, problem="503 slow down")
    read(play)
    play(LogRead, stored=play.stored(7))
    assert play.ordered(Form)[0].origin.step == 7


def test_a_last_checkpoint_whose_answer_was_lost_ends_the_run_when_the_log_has_it(play):
    play.running(3, step=20)
    play.parts(20)
    play.lose("w0001")
    while play.facts.saves.reading is None:
        assert play.at < 1000.0
        play.wait(2.0)
        if isinstance(play.phase, Settling):
            play.settle()
    play(LogRead, stored=play.stored(20))
    assert play.ordered(End)[0].outcome == "finished"


def test_storage_that_never_says_what_was_committed_ends_the_run(play):
    play.running(3, step=7)
    play.parts(7)
    play.lose("w0001")
    play.settle()
    failed(play, 7)
    while not isinstance(play.phase, Ended):
        assert play.at < 1000.0
        play.wait(2.0)
        if play.facts.saves.reading is not None:
            play(LogRead, problem="503 slow down")
    assert play.phase.outcome == "infrastructure"
    assert "what was committed is not known" in play.phase.detail


def test_of_two_attempts_at_a_step_the_younger_generations_counts(replicated):
    play = replicated.running(4, step=20)
    play.part(20, 0)
    play.lose("w0004")
    play.settle()
    play.go()
    play.part(20, 0)
    assert "too late" in play.part(20, 1, generation=1).reason
    play.part(20, 1)
    play.part(20, 2)
    assert play.ordered(Commit)[0].generation == 2


def test_a_commit_of_a_dead_generation_does_not_enter_the_lineage(play):
    play.running(3, step=7)
    play.lose("w0001")
    play.settle()
    play.saved(7, generation=1)
    assert play.facts.saves.stored is None
    assert play.facts.saves.ever_stored
    assert play.commands == ()
    assert "left behind" in play.outcome.reason


def test_a_recovery_from_storage_waits_for_a_commit_that_was_ordered(play):
    play.running(3, step=7)
    play.parts(7)
    play.lose("w0001")
    play.settle()
    assert isinstance(play.phase, Waiting)
    play.saved(7)
    assert play.ordered(Form)[0].origin.step == 7


def test_a_recovery_from_storage_goes_on_when_that_commit_fails(play):
    play.running(3, step=7)
    play.parts(7)
    play.lose("w0001")
    play.settle()
    failed(play, 7)
    read(play)
    play(LogRead, stored=None)
    assert play.ordered(Form)[0].origin == Fresh()


def test_the_checkpoint_of_the_last_step_ends_the_run(play):
    play.running(2, step=20)
    assert isinstance(play.phase, Running)
    play.parts(20)
    play.saved(20)
    assert play.ordered(End)[0].outcome == "finished"


def test_the_last_step_ends_the_run_if_its_checkpoint_is_already_there(play):
    play.running(2, step=19)
    play.part(20, 0)
    play.part(20, 1)
    play.saved(20)
    assert play.phase.outcome == "finished"


def test_the_last_checkpoint_is_tried_again_while_trouble_of_storage_is_borne(play):
    play.running(2, step=20)
    for _ in range(3):
        failed(play, 20)
        failed(play, 20)
        assert play.wait(4.0).commands == ()
        play.wait(36.0)
        assert play.ordered(Save) == [Save(generation=1)]
    failed(play, 20)
    play.wait(41.0)
    assert play.ordered(End)[0].outcome == "infrastructure"
    assert "in 4 tries" in play.ordered(End)[0].detail
    assert "storage failed for 161 s: 503 slow down" in play.ordered(End)[0].detail


def test_a_last_checkpoint_that_nobody_speaks_of_is_asked_for_again(play):
    play.running(2, step=20)
    play.wait(50.0)
    play.part(20, 0)
    play.wait(50.0)
    assert play.commands == ()
    play.wait(11.0)
    assert play.ordered(Save) == [Save(generation=1)]


def test_a_last_commit_that_fails_after_a_death_recovers_the_group(replicated):
    play = replicated.running(4, step=20)
    play.parts(20)
    play.lose("w0004")
    failed(play, 20)
    play.wait(6.0)
    assert isinstance(play.phase, Settling)
    play.settle()
    play.go()
    assert play.commands == (Go(generation=2), Save(generation=2))
