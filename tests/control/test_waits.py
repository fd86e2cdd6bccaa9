"""Deadlines follow from what is known: nobody is given up for work of unknown length."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic_train.config import Timing
from elastic_train.control.commands import Abort, AskPeers, Commit, End, Form, Go, Pause, Save
from elastic_train.control.events import Adopted, LogRead, PeersReported, TermBegan
from elastic_train.control.states import Ended, Forming, Pausing, Running, Settling, Waiting
from elastic_train.control.waits import waits
from elastic_train.recovery.evidence import Fresh, PeerSnapshot

pytestmark = pytest.mark.ring0


def growing(play):
    """A group of two that pauses for a third worker."""
    play.running(2, step=3)
    play.nodes("abc")
    play.ready()
    play.wait(4.0)
    assert isinstance(play.phase, Pausing)
    return play


# -- boundaries ----------------------------------------------------------------------------------------------


def test_nodes_that_arrive_in_a_long_evaluation_wait_for_its_end(replicated):
    """At the default deadlines, ten minutes, every two of them another node."""
    play = replicated
    play.policy = replace(play.policy, timing=Timing(), max_workers=8, max_steps=1000)
    play.running(2, step=100)
    names = "ab"
    for second in range(590):
        if second % 120 == 10:
            names = "abcdefgh"[: len(names) + 1]
            play.nodes(names)
            play.ready()
        play.wait(1.0)
        assert isinstance(play.phase, Running | Pausing)
    play.settle()
    assert isinstance(play.phase, Forming)
    assert len(play.plan.workers) == len(names) == 7
    assert play.facts.failures.ever == 0


def test_a_boundary_is_awaited_while_members_are_seen_to_move(play):
    """An evaluation of an hour, a micro-batch every half minute."""
    growing(play)
    for second in range(0, 3600, 2):
        play.wait(2.0, moved_s=float(second % 30))
    assert isinstance(play.phase, Pausing)
    play.settle()
    assert isinstance(play.phase, Forming)
    assert play.facts.failures.ever == 0


def test_a_group_that_is_not_seen_to_move_does_not_come_to_a_boundary(play):
    growing(play)
    play.wait(40.0, moved_s=0.0)
    play.wait(59.0, moved_s=59.0)
    assert isinstance(play.phase, Pausing)
    play.wait(2.0, moved_s=61.0)
    assert play.ordered(Abort)
    assert play.phase.causes[0].kind == "silence"


def test_steps_and_words_are_signs_of_a_group_that_moves(play):
    growing(play)
    for step in range(4, 14):
        play.wait(50.0)
        play.step(step)
    play.wait(50.0)
    play.settle("w0001")
    play.wait(50.0)
    assert isinstance(play.phase, Pausing)


def test_members_inside_the_jobs_own_code_hold_up_a_group_that_forms(play):
    """A data set of ten minutes where the engine itself has 20 s."""
    play.begin(2).ready()
    for _ in range(300):
        play.wait(2.0, moved_s=0.0)
    assert isinstance(play.phase, Forming)
    play.wait(21.0, moved_s=21.0)
    assert isinstance(play.phase, Settling)


def test_the_jobs_own_code_holds_up_a_group_no_longer_than_it_may(play):
    play.policy = replace(play.policy, timing=replace(play.policy.timing, user_code_s=100.0))
    play.begin(2).ready()
    play.wait(100.0, moved_s=0.0)
    play.wait(19.0, moved_s=0.0)
    assert isinstance(play.phase, Forming)
    play.wait(2.0, moved_s=0.0)
    assert isinstance(play.phase, Settling)


# -- commits -------------------------------------------------------------------------------------------------


def run_down(play, limit_s: float = 10_000.0):
    """Ticks until something is ordered or the run ends."""
    end = play.at + limit_s
    while play.at < end:
        if play.wait(2.0).commands:
            return play.commands
    return ()


def test_a_commit_without_an_answer_is_ordered_again(play):
    play.running(2, step=5)
    play.parts(5)
    (first,) = play.ordered(Commit)
    assert run_down(play) == (first,)
    play.saved(5)
    assert play.facts.saves.attempts == ()
    assert run_down(play, 500.0) == ()


def test_a_commit_that_is_never_answered_costs_nothing_but_itself(play):
    play.running(2, step=5)
    play.parts(5)
    for _ in range(100):
        play.wait(2.0)
    assert play.facts.saves.attempts == ()
    assert isinstance(play.phase, Running)
    play.step(6)
    play.parts(6)
    assert play.ordered(Commit)[0].step == 6


def test_a_run_whose_last_commit_is_never_answered_ends(play):
    play.running(2, step=20)
    play.parts(20)
    orders = []
    for _ in range(1000):
        orders += [type(c) for c in play.wait(2.0).commands]
        if isinstance(play.phase, Ended):
            break
    assert isinstance(play.phase, Ended)
    assert play.phase.outcome == "infrastructure"
    assert {Commit, Save, End} <= set(orders)


def test_workers_that_die_while_the_last_commit_is_not_answered_are_recovered_from(replicated):
    play = replicated.running(4, step=20)
    play.parts(20)
    for worker in play.plan.workers[1:]:
        play.lose(worker)
    assert isinstance(play.phase, Running)
    for _ in range(100):
        play.wait(2.0)
        if isinstance(play.phase, Settling):
            break
    assert isinstance(play.phase, Settling)


def test_a_run_whose_workers_all_die_while_the_last_commit_is_lost_starts_from_what_is_left(play):
    play.running(2, step=20)
    play.parts(20)
    for worker in play.plan.workers:
        play.lose(worker)
    while not isinstance(play.phase, Forming):
        assert play.at < 300.0
        play.wait(2.0)
        play.ready()
        if play.facts.saves.reading is not None:
            play(LogRead, stored=None)
    assert play.facts.lineage.step == 0


def test_a_recovery_from_storage_does_not_wait_for_a_commit_for_ever(play):
    play.running(3, step=7)
    play.parts(7)
    play.lose("w0001")
    play.settle()
    assert isinstance(play.phase, Waiting)
    while play.facts.saves.reading is None:
        assert play.at < 300.0
        play.wait(2.0)
    play(LogRead, stored=None)
    assert play.ordered(Form)[0].origin == Fresh()


# -- peer stores ---------------------------------------------------------------------------------------------


def asking(play):
    play.policy = replace(play.policy, peers=True)
    play.running(3, step=7)
    play.lose("w0001")
    play.settle()
    assert play.ordered(AskPeers)
    return play


def test_peer_stores_that_never_answer_are_done_without(play):
    asking(play)
    play.wait(9.0)
    assert isinstance(play.phase, Waiting)
    play.wait(2.0)
    assert isinstance(play.phase, Forming)
    before = play.state
    play(PeersReported, generation=1, snapshots=(PeerSnapshot(peer_store="a", generation=1, rank=0, step=7),))
    assert "fenced" in play.outcome.reason
    assert play.state is before


# -- the controller ------------------------------------------------------------------------------------------


def come_back(play):
    play(TermBegan, term=play.facts.term + 1, stored=play.facts.saves.stored, ever_stored=False, again=True)
    if not isinstance(play.phase, Ended):
        living = tuple(
            (w.name, w.node, play.facts.lineage.generation, play.facts.lineage.step)
            for w in play.facts.membership.workers
        )
        play(Adopted, running=living)


def test_a_controller_that_is_replaced_while_a_group_forms_is_charged_to_no_machine(replicated):
    play = replicated.running(4, step=5)
    for step in range(6, 26):
        play.policy = replace(play.policy, max_steps=1000)
        play.lose(play.plan.workers[-1])
        play.settle()
        come_back(play)
        play.settle()
        assert play.facts.failures.count == 1
        play.nodes("abcd")
        play.ready()
        play.go()
        play.step(step)
    assert (play.facts.failures.count, play.facts.failures.restarts) == (0, 0)


@pytest.mark.parametrize("phase", ["forming", "running"])
def test_a_controller_that_is_replaced_without_limit_ends_the_run(replicated, phase):
    play = replicated.running(4, step=5)
    if phase == "forming":
        play.broken("w0001")
        play.settle()
    for _ in range(10):
        come_back(play)
        if phase == "forming":
            play.settle()
        assert not isinstance(play.phase, Ended)
    come_back(play)
    assert play.phase.outcome == "infrastructure"
    assert "replaced 11 times without a committed step" in play.phase.detail


# -- what a run waits for ------------------------------------------------------------------------------------


def test_every_phase_says_what_it_waits_for_and_until_when(replicated):
    play = replicated

    def reported() -> dict[str, float | None]:
        return {
            w.what: None if w.until is None else round(w.until - play.at, 1)
            for w in waits(play.state, play.policy)
        }

    play.begin(2)
    assert reported() == {"w0001 to start": 20.0, "w0002 to start": 20.0}
    play.ready()
    assert reported() == {"the group to form": 20.0}
    play.go()
    assert reported() == {"the group to begin": 10.0}
    play.step(1)
    play.parts(1)
    assert reported() == {"the commit of step 1": 14.0, "step 2": None}
    play.saved(1)
    play.broken("w0001")
    assert reported() == {"final reports": 10.0}
    play.lose("w0001")
    play.lose("w0002")
    assert reported()["w0003 to start"] == 20.0
    for _ in range(3):
        play.nodes("ab")
        play.nodes("")
        for worker in play.facts.membership.workers:
            play.lose(worker.name)
    assert reported() == {"workers": 600.0}


# -- words that are lost on their way ------------------------------------------------------------------------


def told(play, kind, limit_s: float) -> list[float]:
    """When a group is told again, within a time in which it is seen to move."""
    began, found = play.at, list[float]()
    while play.at - began < limit_s:
        play.wait(2.0, moved_s=0.0)
        found += [round(play.at - began)] * len(play.ordered(kind))
    return found


def test_a_group_that_was_told_to_train_and_does_not_is_told_again_and_over_in_the_end(play):
    play.running(2)
    assert told(play, Go, 100.0) == [10, 30, 70]
    while not isinstance(play.phase, Settling):
        assert play.at < 300.0
        play.wait(2.0, moved_s=play.at)
    assert play.phase.causes[0].kind == "silence"


def test_a_group_that_was_asked_to_pause_and_trains_on_is_asked_again(play):
    growing(play)
    assert told(play, Pause, 80.0) == [10, 30, 70]
    play.settle("w0001")
    assert told(play, Pause, 50.0) == []
