from __future__ import annotations

from dataclasses import replace

import pytest

from elastic_train.control.commands import End, Form, Go, Save, StartWorker, StopWorker
from elastic_train.control.events import GroupReady, WorkerReady
from elastic_train.control.forming import form_command
from elastic_train.control.states import Ended, Forming, Running, Waiting
from elastic_train.planner.plan import Infeasible
from elastic_train.recovery.evidence import Fresh, FromStorage, Stored
from tests.control.conftest import shown_only

pytestmark = pytest.mark.ring0


def test_workers_are_started_on_every_free_slot_up_to_the_largest_plan(play):
    play.begin(2, slots=3)
    assert [c.worker for c in play.ordered(StartWorker)] == ["w0001", "w0002", "w0003", "w0004"]
    assert [c.node for c in play.ordered(StartWorker)] == ["a", "a", "a", "b"]


def test_standby_workers_are_started_beside_those_of_the_largest_plan(play):
    play.policy = replace(play.policy, standby=1)
    play.begin(3, slots=2)
    assert len(play.ordered(StartWorker)) == 5


def test_the_first_group_forms_when_every_started_worker_is_up(play):
    play.begin(3).ready("w0001", "w0002")
    assert isinstance(play.phase, Waiting)
    play.ready("w0003")
    (form,) = play.ordered(Form)
    assert form.plan.workers == ("w0001", "w0002", "w0003")
    assert (form.generation, form.origin, form.lineage, form.holders) == (1, Fresh(), ((1, 0),), ())


@pytest.mark.parametrize("by_module", [True, False])
def test_how_initial_values_were_given_is_kept_for_whoever_forms_next(play, by_module):
    play.begin(2).ready()
    (form,) = play.ordered(Form)
    assert form.by_module is None
    play(GroupReady, generation=1, step=0, seconds=1.0, by_module=by_module)
    assert play.facts.lineage.by_module is by_module
    play(GroupReady, generation=1, step=0, seconds=1.0)
    assert play.facts.lineage.by_module is by_module
    again = form_command(play.facts, Forming(plan=form.plan, origin=Fresh(), holders=(), since=0.0))
    assert again.by_module is by_module


def test_the_largest_plan_does_not_wait_for_the_standby(play):
    play.policy = replace(play.policy, standby=1)
    play.begin(5).ready("w0001", "w0002", "w0003", "w0004")
    assert play.ordered(Form)[0].plan.world_size == 4


def test_enough_workers_wait_for_stragglers_no_longer_than_the_join_window(play):
    play.begin(3).ready("w0001", "w0002")
    play.wait(2.0)
    assert isinstance(play.phase, Waiting)
    play.wait(2.0)
    assert play.ordered(Form)[0].plan.workers == ("w0001", "w0002")


def test_too_few_workers_wait_and_then_the_run_ends_naming_the_numbers(play):
    play.begin(1).ready()
    play.wait(599.0)
    assert isinstance(play.phase, Waiting)
    play.wait(2.0)
    assert play.ordered(End)[0].outcome == "capacity"
    assert play.ordered(End)[0].detail == "waited 601 s for 2 workers, 1 is there"


def test_a_slow_start_of_enough_workers_is_no_lack_of_capacity(play):
    play.policy = replace(play.policy, timing=replace(play.policy.timing, wait_for_capacity_s=10.0))
    play.begin(3).wait(15.0)
    assert isinstance(play.phase, Waiting)
    play.ready("w0001", "w0002", "w0003")
    assert play.ordered(Form)


def test_a_plan_that_the_planner_refuses_is_told_once_and_named_at_the_end(play):
    play.policy = replace(play.policy, plan=lambda _: Infeasible(reason="70 GiB per rank exceed 64 GiB"))
    play.begin(2).ready()
    assert "70 GiB" in play.outcome.reason
    assert play.wait(1.0).reason == "nothing to do"
    play.wait(600.0)
    assert play.outcome.state.phase.outcome == "capacity"
    assert "70 GiB" in play.outcome.state.phase.detail


def test_a_plan_with_fewer_ranks_than_the_minimum_is_no_plan(play):
    play.policy = replace(play.policy, plan=shown_only(play.policy.plan, lambda _: 1))
    play.begin(3).ready()
    assert isinstance(play.phase, Waiting)
    assert "at least 2 are needed" in play.phase.problem


def test_a_ready_group_trains_and_a_repeated_word_changes_nothing(play):
    play.begin(2).ready()
    play.go()
    assert play.ordered(Go) == [Go(generation=1)]
    before = play.state
    play(GroupReady, generation=1, step=0, seconds=1.0)
    assert play.state is before


def test_a_run_resumes_from_its_checkpoint_in_a_later_generation(play):
    stored = Stored(slot=3, step=8, generation=1002, term=2, path="checkpoints/8")
    play.begin(2, stored=stored).ready()
    (form,) = play.ordered(Form)
    assert form.origin == FromStorage(stored=stored)
    assert form.generation > 1002
    assert form.lineage == ((1002, 0), (form.generation, 8))


def test_a_finished_run_ends_at_once_and_starts_nothing(play):
    play.begin(2, stored=Stored(slot=3, step=20, generation=5, term=1, path="checkpoints/20"))
    assert isinstance(play.phase, Ended)
    assert play.phase.outcome == "finished"
    assert "already complete" in play.phase.detail
    assert play.commands == ()


def test_a_worker_that_comes_after_it_was_given_up_is_stopped(play):
    play.begin(2)
    play(WorkerReady, worker="w0009", node="a", pid=1)
    assert play.commands == (StopWorker(worker="w0009", reason="it came after it was given up"),)


def test_a_worker_that_is_ready_twice_is_ready_once(play):
    play.begin(3).ready("w0001")
    before = play.state
    play(WorkerReady, worker="w0001", node="a", pid=1)
    assert play.state is before


def test_a_group_formed_after_the_last_step_only_saves_it(play):
    play.running(3, step=20)
    play.lose("w0003")
    play.nodes("abcd")
    play.settle()
    assert isinstance(play.phase, Forming)
    play.go()
    assert play.ordered(Save) == []  # no state of step 20 was left: it starts over


def test_a_replica_left_after_the_last_step_saves_it(replicated):
    play = replicated.running(4, step=20)
    play.lose("w0004")
    play.settle()
    play.go()
    assert isinstance(play.phase, Running)
    assert play.ordered(Save) == [Save(generation=2)]


def test_a_cluster_without_room_is_told_what_is_waited_for(play):
    play.policy = replace(play.policy, min_workers=5, max_workers=6, each=" of 1 CPU")
    play.begin(3)
    said = " with room for 3 workers of 1 CPU: at least 5 are waited for"
    assert said in play.outcome.reason
    play.nodes("abcde")
    assert "waited for" not in play.outcome.reason
