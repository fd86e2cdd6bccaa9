from __future__ import annotations

from dataclasses import replace

import pytest

from elastic_train.control.commands import Abort, Form, Pause, StartWorker, StopWorker
from elastic_train.control.events import Cause
from elastic_train.control.states import Forming, Pausing, Running, Settling, Waiting
from elastic_train.control.switch_cost import expected_s
from elastic_train.recovery.evidence import Live
from tests.control.conftest import shown_only

pytestmark = pytest.mark.ring0


def test_a_newcomer_is_taken_in_after_the_join_window(play):
    play.running(2, step=3)
    play.nodes("abc")
    play.ready()
    play.wait(2.0)
    assert isinstance(play.phase, Running)
    play.wait(2.0)
    assert play.commands == (Pause(generation=1),)
    play.settle("w0001")
    assert isinstance(play.phase, Pausing)
    play.settle("w0002")
    (form,) = play.ordered(Form)
    assert form.plan.workers == ("w0001", "w0002", "w0003")
    assert form.origin == Live(generation=1, step=3)
    play.go()
    assert play.facts.failures.count == 0


def test_arrivals_come_in_one_batch(play):
    play.running(2, step=3)
    play.nodes("abc")
    play.ready()
    play.wait(2.0)
    play.nodes("abcd")
    play.ready()
    play.wait(2.0)
    assert isinstance(play.phase, Running)
    play.wait(2.0)
    assert isinstance(play.phase, Pausing)
    play.settle()
    assert play.plan.world_size == 4


def test_a_group_that_has_just_grown_does_not_grow_again(play):
    play.running(2, step=3)
    play.nodes("abc")
    play.ready()
    play.wait(4.0)
    play.settle()
    play.go()
    play.nodes("abcd")
    play.ready()
    play.wait(8.0)
    assert isinstance(play.phase, Running)
    play.wait(6.0)
    assert isinstance(play.phase, Pausing)


def test_after_a_failure_a_group_grows_back_without_a_cool_down(replicated):
    play = replicated.running(4, step=3)
    play.lose("w0004")
    play.settle()
    play.go()
    play.ready()
    play.wait(4.0)
    assert isinstance(play.phase, Pausing)


def test_the_fewer_of_the_possible_workers_run_the_sooner_a_group_grows_again(replicated):
    """Grown from 3 to 4 workers, then left with two or with one, and offered others."""
    waits = {}
    for lost in (("w0003", "w0004"), ("w0002", "w0003", "w0004")):
        play = replicated.running(3, step=1)
        play.nodes("abcd")
        play.ready()
        play.wait(4.0)
        settle_and_go(play)
        for worker in lost:
            play.lose(worker)
        settle_and_go(play)
        play.nodes("abcd"[: 4 - len(lost)] + "efg"[: len(lost) - 1])
        play.ready()
        waits[len(lost)] = 0
        while isinstance(play.phase, Running):
            play.wait(0.5)
            waits[len(lost)] += 1
    assert waits[3] < waits[2]


def settle_and_go(play):
    if isinstance(play.phase, Settling | Pausing):
        play.settle()
    if isinstance(play.phase, Forming):
        play.go()


def test_flapping_capacity_costs_few_switches_and_never_goes_below_the_minimum(replicated):
    """Capacity 3, 2, 3, 2, 4, 3, 4 at two-second intervals: every loss is a switch, the gains are one."""
    play = replicated.running(3, step=1)
    step = 1
    for names in ("ab", "abc", "ab", "abcd", "abd", "abde"):
        play.nodes(names)
        play.ready()
        settle_and_go(play)
        play.wait(1.0)
        settle_and_go(play)
        step += 1
        play.step(step)
        play.wait(1.0)
        assert play.plan.world_size >= 2
    for _ in range(8):  # the cool-down after a growth
        play.wait(2.0)
        settle_and_go(play)
    assert play.plan.world_size == 4
    assert play.facts.measured.reconfigurations <= 4


def test_a_plan_that_would_not_grow_is_declined_once(play):
    play.policy = replace(play.policy, plan=shown_only(play.policy.plan, lambda _: 2))
    play.running(2, step=3)
    play.nodes("abc")
    play.ready()
    assert "does not grow" in play.wait(4.0).reason
    assert play.phase.declined.idle == ("w0003",)
    assert play.wait(4.0).reason == "nothing to do"


def test_a_larger_group_that_the_planner_refuses_is_declined(play):
    from elastic_train.planner.plan import Infeasible

    whole = play.policy.plan
    play.policy = replace(
        play.policy,
        plan=lambda asked: whole(asked) if len(asked.worker_slots) < 3 else Infeasible(reason="odd"),
    )
    play.running(2, step=3)
    play.nodes("abc")
    play.ready()
    assert "does not grow: odd" in play.wait(4.0).reason


def test_few_steps_left_are_not_worth_a_switch(real):
    play = real.running(2, step=3)
    play.nodes("abc")
    play.ready()
    play.wait(4.0)
    play.at += 4.0
    play.settle()
    play.go()
    said = play.step(4).reason
    assert said.startswith("step 4 is committed; the switch took 3 s beside it"), (
        "of the four that it stood still"
    )
    for number in range(5, 20):
        play.step(number)
    play.nodes("abcd")
    play.ready()
    play.wait(60.0)
    assert isinstance(play.phase, Running)
    assert (
        "dp_replicate 3 stays: dp_replicate 4 promises 100.0% less, a change takes 2.8" in play.outcome.reason
    )


def test_before_the_first_switch_one_is_taken_to_cost_what_forming_and_a_long_first_step_took(real):
    play = real.begin(2)
    play.ready()
    play.at += 3.0
    play.go()
    play.step(1, seconds=2.5)
    play.step(2, seconds=1.0)
    assert expected_s(play.facts.measured) == pytest.approx(3.0 + 1.5, abs=0.01)


def test_standby_workers_beyond_the_largest_plan_change_nothing(play):
    play.policy = replace(play.policy, standby=1)
    play.running(5, step=3)
    play.wait(30.0)
    assert play.outcome.reason == "nothing to do"


# -- drains -----------------------------------------------------------------------------------------------


def test_a_draining_node_is_left_at_once_when_its_workers_are_replaced(play):
    play.policy = replace(play.policy, standby=1)
    play.running(5, step=3)
    play.nodes("abcde", leaving="b", by=play.at + 100.0)
    assert play.commands == (Pause(generation=1),)
    play.settle()
    (form,) = play.ordered(Form)
    assert form.plan.workers == ("w0001", "w0005", "w0003", "w0004")
    assert form.holders == ("w0001", "w0002", "w0003", "w0004")
    play.go()
    assert play.ordered(StopWorker) == [StopWorker(worker="w0002", reason="node b is draining")]
    assert play.facts.failures.count == 0


def test_a_replacement_that_is_starting_is_waited_for_while_there_is_time(play):
    play.running(3, step=3)
    play.nodes("abc", leaving="b", by=play.at + 100.0)
    assert isinstance(play.phase, Pausing)  # nobody could replace it
    play.settle()
    play.go()
    play.nodes("abc")
    play.ready()
    play.wait(60.0)
    play.settle()
    play.go()
    assert play.plan.world_size == 3
    play.nodes("abcd", leaving="c", by=play.at + 100.0)
    assert isinstance(play.phase, Running)
    play.ready()
    assert isinstance(play.phase, Pausing)


def test_a_near_deadline_is_not_waited_out(play):
    play.running(3, step=3)
    play.nodes("abcd", leaving="c", by=play.at + 30.0)
    assert [c.node for c in play.ordered(StartWorker)] == ["d"]
    play.wait(15.0)
    assert isinstance(play.phase, Running)
    play.wait(6.0)
    assert isinstance(play.phase, Pausing)


def test_a_second_earlier_notice_of_a_node_is_heeded(play):
    play.running(3, step=3)
    play.nodes("abcd", leaving="c", by=play.at + 100.0)
    play.wait(6.0)
    assert isinstance(play.phase, Running), "its replacement is waited for"
    play.nodes("abcd", leaving="c", by=play.at + 5.0)
    assert isinstance(play.phase, Pausing)


def test_several_notices_are_one_pause(play):
    play.running(4, step=3)
    play.nodes("abcd", leaving="c", by=play.at + 100.0)
    play.settle("w0001")
    play.nodes("abcd", leaving="cd", by=play.at + 100.0)
    assert isinstance(play.phase, Pausing)
    play.settle()
    assert play.ordered(Form)[0].plan.workers == ("w0001", "w0002")


def test_when_every_node_leaves_the_group_saves_and_waits(play):
    play.running(3, step=3)
    play.nodes("abc", leaving="abc", by=play.at + 5.0)
    assert play.commands == (Pause(generation=1, save=True),)
    play.settle()
    assert isinstance(play.phase, Waiting)
    play.nodes("abcde", leaving="abc", by=play.at + 5.0)
    play.ready()
    (form,) = play.ordered(Form)
    assert form.plan.workers == ("w0004", "w0005")
    assert form.origin == Live(generation=1, step=3)


def test_a_drain_that_is_cut_short_is_a_preemption(play):
    play.running(4, step=3)
    play.nodes("abcd", leaving="d", by=play.at + 5.0)
    play.nodes("abc")
    assert isinstance(play.phase, Settling)
    play.settle()
    assert play.facts.failures.count == 0


def test_a_failure_in_a_pause_keeps_the_words_that_were_said(play):
    play.running(2, step=3)
    play.nodes("abc")
    play.ready()
    play.wait(4.0)
    play.settle("w0001")
    play.settle("w0002", error=Cause(kind="engine", detail="bad"))
    (form,) = play.ordered(Form)
    assert form.origin == Live(generation=1, step=3)
    assert play.facts.failures.count == 1


def test_a_repeated_word_in_a_pause_changes_nothing(play):
    play.running(3, step=3)
    play.nodes("abcd")
    play.ready()
    play.wait(4.0)
    play.settle("w0001")
    before = play.state
    play.settle("w0001")
    assert play.state is before


def test_a_pause_that_does_not_come_is_a_failure(play):
    play.running(2, step=3)
    play.nodes("abc")
    play.ready()
    play.wait(4.0)
    play.wait(55.0)
    assert isinstance(play.phase, Pausing)
    play.wait(7.0)
    assert play.ordered(Abort) == [Abort(generation=1, workers=("w0001", "w0002"))]


def test_the_last_step_makes_a_pause_pointless(play):
    play.running(2, step=19)
    play.nodes("ab", leaving="b", by=play.at + 1.0)
    assert isinstance(play.phase, Pausing)
    play.step(20)
    assert isinstance(play.phase, Running)
    play.wait(30.0)
    assert isinstance(play.phase, Running)
