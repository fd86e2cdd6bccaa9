from __future__ import annotations

from dataclasses import replace

import pytest

from elastic_train.control.commands import StartWorker, StopWorker
from elastic_train.control.events import Cause, LacksRoom, Node, WorkerLost
from elastic_train.control.membership import COMES_BACK_S, worker_slots
from elastic_train.control.states import Facts, Forming, Membership, Worker
from elastic_train.planner.plan import Mesh, Plan

pytestmark = pytest.mark.ring0


def started(play) -> list[str]:
    return [c.node for c in play.ordered(StartWorker)]


def test_a_lost_worker_is_replaced_where_there_is_room(replicated):
    play = replicated.running(4, step=2)
    play.lose("w0004")
    assert play.ordered(StartWorker) == [StartWorker(worker="w0005", node="d")]


def test_a_standby_is_replaced_once_the_group_that_it_joined_has_come_back(replicated):
    """A process that starts takes cores from the one that comes back."""
    play = replicated
    play.policy = replace(play.policy, standby=1, max_workers=3)
    play.running(4, step=2)
    play.lose("w0003")
    assert started(play) == []
    play.settle("w0001", "w0002")
    assert isinstance(play.phase, Forming)
    play.wait(0.5)
    assert started(play) == []
    play.go()
    play.wait(0.5)
    assert started(play) == ["c"]


def test_a_group_that_takes_long_to_come_back_does_not_keep_workers_from_starting(replicated):
    play = replicated
    play.policy = replace(play.policy, standby=1, max_workers=3)
    play.running(4, step=2)
    play.lose("w0003")
    play.wait(COMES_BACK_S)
    assert started(play) == ["c"]


def test_no_worker_is_started_on_a_node_that_leaves(replicated):
    play = replicated.running(4, step=2)
    play.nodes("abcd", leaving="d", by=play.at + 500.0)
    play.lose("w0004")
    assert started(play) == []


def test_a_node_whose_workers_end_unused_is_quarantined_and_comes_back(play):
    play.begin(3).ready("w0001", "w0002")
    for name in ("w0003", "w0004"):
        play.lose(name)
        assert started(play) == ["c"]
    play.lose("w0005")
    assert started(play) == []
    assert "node c is quarantined for 20 s" in play.outcome.reason
    play.go()
    play.wait(19.0)
    assert started(play) == []
    play.wait(2.0)
    assert started(play) == ["c"]


def test_every_further_quarantine_is_twice_as_long_up_to_a_limit(play):
    play.policy = replace(play.policy, quarantine_limit_s=50.0)
    play.begin(3)
    for seconds in (20, 40, 50):
        for _ in range(3):
            play.lose(play.facts.membership.workers[-1].name)
        assert f"quarantined for {seconds} s" in play.outcome.reason
        play.wait(seconds + 1.0)


def test_flaps_are_forgotten_after_the_window(play):
    play.policy = replace(play.policy, flap_window_s=100.0)
    play.begin(3)
    play.lose("w0003")
    play.lose("w0004")
    play.at += 101.0
    play.lose("w0005")
    assert started(play) == ["c"]


def test_a_worker_that_was_of_use_is_no_flap(replicated):
    play = replicated.running(4)
    for number in range(1, 6):
        play.step(number)
        play.lose(play.plan.workers[-1])
        play.ready()
        play.settle()
        play.go()
    assert play.facts.membership.flaps == ()


def test_the_record_of_a_node_is_clean_after_a_committed_step(play):
    play.begin(3)
    play.lose("w0003")
    assert [f.node for f in play.facts.membership.flaps] == ["c"]
    play.ready()
    play.go()
    play.step(1)
    assert play.facts.membership.flaps == ()


def test_a_worker_that_takes_too_long_to_start_is_given_up_and_a_flap_of_its_node(play):
    play.begin(3).ready("w0001")
    play.wait(19.0)
    assert play.commands == ()
    play.wait(2.0)
    assert [c.worker for c in play.ordered(StopWorker)] == ["w0002", "w0003", "w0001"]
    assert {f.node for f in play.facts.membership.flaps} == {"b", "c"}
    assert "w0002 did not start on b within 20 s" in play.outcome.reason


def test_a_run_with_too_few_workers_that_finds_no_room_gives_back_what_it_has_for_a_while(play):
    play.begin(3).ready("w0001")
    play.wait(21.0)
    assert play.facts.membership.workers == ()
    assert "the room of 1 is given to others" in play.outcome.reason
    waited = 0.0
    while not play.facts.membership.workers:
        assert waited < 20.0, "no longer than a worker may take to start"
        play.wait(1.0)
        waited += 1.0
    assert waited >= 2.0, "another run has the time to take it"
    assert [w.node for w in play.facts.membership.workers] == ["a", "b", "c"]


def test_a_run_that_holds_what_storage_has_not_keeps_its_workers_for_longer(play):
    play.running(3, step=5)
    play.lose("w0003")
    play.lose("w0002")
    play.settle()
    play.wait(25.0)
    assert "w0001" in [w.name for w in play.facts.membership.workers]


def test_a_worker_that_finds_no_room_is_no_fault_of_its_node(play):
    play.begin(3).ready("w0001")
    play(LacksRoom, worker="w0002", holders="another run holds it")
    assert play.outcome.reason == "w0002 waits for room on b: another run holds it"
    play(LacksRoom, worker="w0001", holders="another run holds it")
    assert not play.facts.membership.workers[0].lacks_room, "it is up"
    play.wait(21.0)
    assert {f.node for f in play.facts.membership.flaps} == {"c"}
    assert "w0002 found no room on b within 20 s" in play.outcome.reason


def test_nor_where_its_start_is_given_up_by_who_performs_it(play):
    play.begin(3).ready("w0001")
    play(LacksRoom, worker="w0002", holders="another run holds it")
    for worker in ("w0002", "w0003"):
        play(WorkerLost, worker=worker, cause=Cause(kind="silence", detail="it was not up"))
    assert {f.node for f in play.facts.membership.flaps} == {"c"}


def test_state_that_storage_has_not_is_kept_from_who_needs_the_room_for_as_long_as_it_took_to_compute(play):
    play.running(3, step=5)
    play.lose("w0003")
    play.lose("w0002")
    play.settle()
    for worker in play.facts.membership.workers:
        play(LacksRoom, worker=worker.name, holders="another run holds it")
    play.wait(25.0)
    assert play.facts.membership.workers == ()
    assert "the room of 1 is given to others" in play.outcome.reason


def test_after_the_last_step_nobody_is_started(replicated):
    play = replicated.running(4, step=20)
    play.nodes("abcde")
    assert started(play) == []


def test_losing_an_idle_worker_disturbs_nobody(play):
    play.policy = replace(play.policy, standby=1)
    play.running(5, step=2)
    before = play.phase
    play.lose("w0005")
    assert play.phase is before


def test_a_plan_that_takes_only_some_workers_stands_on_many_nodes() -> None:
    workers = tuple(
        Worker(name=name, node=node, status="ready", since=0.0)
        for name, node in (("w1", "a"), ("w2", "a"), ("w3", "a"), ("w4", "b"), ("w5", "c"))
    )
    facts = Facts(membership=Membership(nodes=tuple(Node(name=n, slots=3) for n in "abc"), workers=workers))
    assert [s.worker for s in worker_slots(facts, None)] == ["w1", "w4", "w5", "w2", "w3"]
    last = Plan(mesh=Mesh(dp_replicate=1), workers=("w2",), nodes=("a",), shares=((0,),))
    assert [s.worker for s in worker_slots(facts, last)][:3] == ["w2", "w4", "w5"]


def test_workers_fill_one_node_after_the_other(play):
    play.policy = replace(play.policy, max_workers=4)
    play.begin(3, slots=3)
    assert started(play) == ["a", "a", "a", "b"]


def test_workers_that_are_spread_take_one_place_of_each_node_first(play):
    play.policy = replace(play.policy, max_workers=4, spread=True)
    play.begin(3, slots=3)
    assert sorted(w.node for w in play.facts.membership.workers) == ["a", "a", "b", "c"]
    play.ready()
    play.lose("w0002")
    assert sorted(w.node for w in play.facts.membership.workers) == ["a", "a", "b", "c"]
