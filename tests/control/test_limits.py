"""What is borne no longer: preemptions, controllers that are replaced, checkpoints that are not written."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest

from elastic_train.control.commands import Pause
from elastic_train.control.events import Adopted, SaveFailed, Straggling, TermBegan
from elastic_train.control.states import Ended, Running

pytestmark = pytest.mark.ring0


def bears(play, **limits):
    play.policy = replace(play.policy, max_steps=10_000, **limits)
    return play


def leave(play, node: str, nodes: str = "abcd") -> None:
    """A node goes with notice, and the rest trains on."""
    play.nodes(nodes, leaving=node)
    play.settle()


def test_one_preemption_more_than_is_borne_ends_a_run_with_its_checkpoint(replicated):
    play = bears(replicated, preemptions=1).running(4, step=3)
    leave(play, "d")
    play.go()
    play.step(4)
    assert (type(play.phase), play.facts.failures.preemptions) == (Running, 1)
    play.nodes("abc", leaving="c")
    assert play.ordered(Pause) == [Pause(generation=play.facts.lineage.generation, save=True)]
    play.settle()
    play.parts(4)
    play.saved(4)
    assert play.phase.outcome == "infrastructure"
    assert "2 preemptions, max_preemption_failures=1; the last: c" in play.phase.detail
    assert "the checkpoint of step 4 is kept" in play.phase.detail


@pytest.mark.parametrize("limit", [None, 0, 1, 2])
def test_machines_that_go_without_a_word_of_theirs_count_once_in_any_order(replicated, limit):
    for order in permutations(("lost", "broken", "noticed")):
        play = type(replicated)(replicated.policy)
        bears(play, preemptions=limit).running(4, step=3)
        for word in order:
            if word == "lost":
                play.lose("w0004", "preemption", node="d")
            elif word == "broken":
                play.broken("w0001")
            elif not isinstance(play.phase, Ended):
                play.nodes("abcd", leaving="d")
        play.settle()
        assert play.facts.failures.preemptions == 1
        assert play.facts.failures.ever == 0
        if order[0] == "noticed" and limit == 0:  # there was time for a checkpoint: it is made up for
            play.go()
            play.settle()
            play.parts(3)
            play.saved(3)
            assert "the checkpoint of step 3 is kept" in play.phase.detail
        assert isinstance(play.phase, Ended) == (limit == 0)
        if limit == 0:
            assert play.phase.outcome == "infrastructure"
            assert "1 preemption, max_preemption_failures=0" in play.phase.detail


def test_a_node_that_is_left_for_being_slow_was_not_taken_away(replicated):
    play = bears(replicated, preemptions=0, evict_slower_than=2.0).running(4, step=3)
    worker, node = play.plan.workers[1], play.plan.nodes[1]
    play(Straggling, generation=play.facts.lineage.generation, worker=worker, node=node, rank=1, factor=4.0)
    play.settle()
    play.go()
    assert node not in play.plan.nodes
    assert (type(play.phase), play.facts.failures.preemptions) == (Running, 0)


@pytest.mark.parametrize("limit", [0, 2])
def test_as_many_controllers_are_replaced_as_is_borne(replicated, limit):
    play = bears(replicated, restarts=limit).running(4, step=5)
    for number in range(limit + 1):
        assert not isinstance(play.phase, Ended)
        play(TermBegan, term=2 + number, stored=None, ever_stored=False, again=True)
        if not isinstance(play.phase, Ended):
            living = tuple(
                (w.name, w.node, play.facts.lineage.generation, play.facts.lineage.step)
                for w in play.facts.membership.workers
            )
            play(Adopted, running=living)
    assert play.phase.outcome == "infrastructure"


def fail(play, step: int, times: int = 1) -> None:
    for _ in range(times):
        play(SaveFailed, generation=1, step=step, problem="No space left on device")


def test_a_run_whose_checkpoints_are_not_written_trains_on_where_nothing_else_is_said(play):
    bears(play).running(2, step=1)
    for step in range(2, 200):
        play.at += 60.0
        play.step(step)
        fail(play, step)
    assert isinstance(play.phase, Running)


def test_so_many_checkpoints_in_a_row_end_a_run_however_many_ranks_tell_of_each(play):
    bears(play, unsaved=3).running(2, step=1)
    for step, ended in ((2, False), (3, False), (4, True)):
        play.step(step)
        if step == 2:
            play.saved(1)  # one that was on its way
        fail(play, step, times=2)
        assert isinstance(play.phase, Ended) == ended
    assert play.phase.outcome == "infrastructure"
    assert "3 checkpoints in a row could not be written" in play.phase.detail
    assert "Limits(unsaved=3)); step 1 is kept; the last: No space left" in play.phase.detail


def test_a_checkpoint_that_is_written_begins_the_count_anew(play):
    bears(play, unsaved=2).running(2, step=1)
    for step in range(2, 10):
        play.step(step)
        fail(play, step)
        play.parts(step)
        play.saved(step, slot=step)
    assert isinstance(play.phase, Running)


def test_a_time_without_a_checkpoint_ends_a_run_too(play):
    bears(play, unsaved_s=600.0).running(2, step=1)
    step, began = 1, play.at
    while not isinstance(play.phase, Ended):
        play.at += 50.0
        step += 1
        play.step(step)
        fail(play, step)
    assert 600.0 <= play.at - began <= 700.0
    assert "Limits(unsaved_s=600)); nothing was saved" in play.phase.detail
