from __future__ import annotations

from dataclasses import replace

import pytest

from elastic_train.config import Checkpoints
from elastic_train.control.commands import Commit, End, Form, Go, Prune, ReadLog, Save
from elastic_train.control.events import (
    Adopted,
    CheckpointRejected,
    FinalReport,
    LogRead,
    PeersHeld,
    SaveFailed,
    SaveRequested,
    TermBegan,
)
from elastic_train.control.states import Ended, Running, Settling, Waiting
from elastic_train.recovery.evidence import Fresh, FromStorage

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


# -- damaged checkpoints -----------------------------------------------------------------------------------


def reading(play):
    """A group that forms from step 10, with step 5 behind it."""
    play.running(3, step=12)
    play.parts(5)
    play.saved(5, slot=1)
    play.parts(10)
    play.saved(10, slot=2)
    play.lose("w0001")
    play.settle()
    return play.stored(5, slot=1, generation=1), play.stored(10, slot=2, generation=1)


def hold_nothing(play):
    for worker in play.phase.pending:
        play(FinalReport, generation=play.facts.lineage.generation, worker=worker, local_states=())


def test_a_damaged_checkpoint_gives_way_to_the_next_sound_one(play):
    older, newer = reading(play)
    play(CheckpointRejected, stored=newer, problem="checksum", fallback=older)
    hold_nothing(play)
    assert play.ordered(Form)[0].origin == FromStorage(stored=older)
    assert [c.stored.slot for c in play.facts.saves.commitments] == [1]
    assert play.facts.failures.count == 1  # the loss; not the damage


def test_without_a_sound_checkpoint_the_run_ends_and_never_starts_from_step_0(play):
    _, newer = reading(play)
    play(CheckpointRejected, stored=newer, problem="checksum", fallback=None)
    hold_nothing(play)
    assert play.ordered(End)[0].outcome == "checkpoint"


def test_damage_that_is_found_while_nobody_reads_is_remembered(play):
    play.running(2, step=6)
    play.parts(5)
    play.saved(5, slot=1)
    play(CheckpointRejected, stored=play.stored(5, slot=1), problem="checksum", fallback=None)
    assert isinstance(play.phase, Running)
    assert (play.facts.saves.stored, play.facts.saves.commitments) == (None, ())
    play(CheckpointRejected, stored=play.stored(5, slot=1), problem="checksum", fallback=None)
    assert play.facts.saves.stored is None


def test_the_checkpoint_that_is_being_read_is_not_pruned(play):
    play.policy = replace(play.policy, checkpoints=Checkpoints(every=5, keep=1))
    reading(play)
    play.saved(11, slot=3, generation=1)
    assert play.commands == ()  # step 11 was left behind
    play.saved(9, slot=4, generation=1)
    assert play.ordered(Prune)[0].keep == (2,)


# -- cadence by cost --------------------------------------------------------------------------------------


def test_control_asks_for_checkpoints_where_the_cadence_is_automatic(play):
    play.policy = replace(play.policy, max_steps=1000, checkpoints=Checkpoints(every="auto"))
    play.running(2, step=3)
    play.at += 60.0
    play.step(4)
    assert play.commands == (Save(generation=1),)
    play.at += 60.0
    play.step(5)  # nothing was measured yet and nothing was written
    assert play.commands == (Save(generation=1),)
    play.part(5, 0)
    play.at += 50.0
    play.step(6, seconds=3.0)  # two seconds longer than others; another would supersede the attempt
    assert play.commands == ()
    play.part(5, 1)
    play.saved(5)
    play.at += 15.0
    play.step(7)
    assert play.commands == ()
    play.at += 60.0
    play.step(8)
    assert play.commands == (Save(generation=1),)


def test_words_after_the_last_step_are_no_sign_of_a_failure(play):
    play.running(2, step=20)
    play.settle()
    assert isinstance(play.phase, Running)
    assert play.commands == ()


def test_a_checkpoint_that_a_person_asks_for_is_taken_at_the_next_step(play):
    play.running(step=3)
    outcome = play(SaveRequested, reason="`ckpt save`")
    assert play.ordered(Save) == [Save(generation=1)]
    assert "asked for" in outcome.reason


def test_nothing_is_saved_on_request_where_nothing_trains(play):
    play.begin()
    play(SaveRequested, reason="`ckpt save`")
    assert not play.ordered(Save)


def test_what_a_checkpoint_costs_is_by_how_much_its_steps_were_longer(play):
    play.running(step=1)
    for step in range(2, 10):
        play.step(step, seconds=1.0)
    play(SaveRequested, reason="test")
    play.step(10, seconds=1.25)
    play.step(11, seconds=1.5)
    play.parts(10)
    play.saved(10)
    assert play.facts.measured.save_cost_s == pytest.approx(0.75)
    play.step(12, seconds=3.0)
    assert play.facts.measured.save_cost_s == pytest.approx(0.75)
