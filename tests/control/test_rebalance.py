"""A slow worker gets fewer micro-batches, and as many as its peers again once it keeps up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic_train.control.commands import Pause
from elastic_train.control.events import Straggling
from elastic_train.control.states import Pausing, Running
from elastic_train.planner.plan import Infeasible
from elastic_train.planner.question import Planned, Question
from tests.control.conftest import Play

pytestmark = pytest.mark.ring0


def paced(play: Play, worker: str, factor: float) -> None:
    """`worker` is found to be slower than its peers by a factor, or at 0 no more."""
    plan = play.plan
    rank = plan.workers.index(worker)
    play(
        Straggling,
        generation=play.facts.lineage.generation,
        worker=worker,
        node=plan.nodes[rank],
        rank=rank,
        factor=factor,
    )


def long_run(play: Play) -> Play:
    play.policy = replace(play.policy, max_steps=1000)
    return play.running(4, step=5)


def lengths(play: Play) -> list[int]:
    return [len(share) for share in play.plan.shares]


def switched(play: Play) -> None:
    play.settle()
    play.go()
    play.step(play.facts.lineage.step + 1)


def test_shares_follow_a_slow_worker_and_back_and_no_step_is_lost(real: Play) -> None:
    play = long_run(real)
    workers = play.plan.workers
    assert lengths(play) == [4, 4, 4, 4]
    paced(play, workers[3], 2.0)
    assert play.commands == (Pause(generation=1),)
    change = play.outcome.change
    assert change is not None
    assert (change.kind, change.workers) == ("rebalance", (workers[3],))
    assert "2.0 times slower: shares of 5, 5, 4, 2 micro-batches" in play.outcome.reason
    switched(play)
    assert (play.plan.workers, lengths(play)) == (workers, [5, 5, 4, 2])
    assert (play.facts.lineage.step, play.facts.failures.count) == (6, 0)
    paced(play, workers[3], 0.0)
    assert isinstance(play.phase, Running), "a switch just was"
    play.wait(100.0)
    assert isinstance(play.phase, Pausing)
    assert "all keep up" in play.outcome.reason
    switched(play)
    assert lengths(play) == [4, 4, 4, 4]


def test_shares_stay_where_the_steps_left_are_worth_less_than_a_switch(real: Play) -> None:
    play = long_run(real)
    worker = play.plan.workers[3]
    paced(play, worker, 2.0)
    play.wait(30.0)
    switched(play)  # which took half a minute
    play.policy = replace(play.policy, max_steps=12)
    play.wait(2000.0)
    paced(play, worker, 0.0)
    assert isinstance(play.phase, Running)
    assert "shares stay as they are: dp_replicate 4 stays: other shares promise" in play.outcome.reason
    declined = play.phase.declined
    assert declined is not None
    play.wait(1.0)
    assert isinstance(play.phase, Running)
    assert play.phase.declined == declined, "it isn't asked again at once"


def test_a_group_that_forms_anew_counts_with_the_slow_worker(real: Play) -> None:
    play = long_run(real)
    workers = play.plan.workers
    paced(play, workers[3], 2.0)
    switched(play)
    play.lose(workers[0])
    play.settle()
    by_worker = dict(zip(play.plan.workers, lengths(play), strict=True))
    assert by_worker[workers[3]] < min(n for worker, n in by_worker.items() if worker != workers[3])


def test_a_slow_worker_that_is_gone_is_forgotten(real: Play) -> None:
    play = long_run(real)
    paced(play, play.plan.workers[3], 2.0)
    switched(play)
    play.lose(play.plan.workers[3])
    play.settle()
    play.go()
    assert play.facts.membership.slow == ()
    assert max(lengths(play)) - min(lengths(play)) <= 1


def test_a_plan_that_leaves_the_slow_worker_out_is_called_what_it_is(real: Play) -> None:
    planner = real.policy.plan

    def without_slow(question: Question) -> Planned | Infeasible:
        quick = tuple(slot for slot in question.worker_slots if slot.speed > 0.1)
        return planner(replace(question, worker_slots=quick))

    real.policy = replace(real.policy, plan=without_slow)
    play = long_run(real)
    workers = play.plan.workers
    paced(play, workers[3], 50.0)
    change = play.outcome.change
    assert change is not None
    assert (change.kind, change.workers) == ("shrink", (workers[3],))
    assert f"going on as dp_replicate 3 on 3 nodes without {workers[3]}" in play.outcome.reason
    switched(play)
    assert play.plan.workers == workers[:3]
