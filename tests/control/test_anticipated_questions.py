"""Questions that are asked ahead are those that a run comes to ask, and have the answers it gets anyway."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic_train.control.commands import Form
from elastic_train.control.plan_ahead import likely
from elastic_train.control.states import Pausing
from elastic_train.planner.plan_cache import PlanCache
from tests.control.conftest import Play

pytestmark = pytest.mark.ring0


def asked_ahead(play: Play, turns: int) -> PlanCache:
    ready = play.policy.plan
    assert isinstance(ready, PlanCache)
    for turn in range(turns):
        question = likely(play.state, play.policy, play.at, turn)
        if question is not None:
            ready.prepare(question)
    return ready


@pytest.mark.parametrize("lost", ["w0002", "w0004"])
def test_the_plan_after_a_loss_was_there_before_it(real: Play, lost: str) -> None:
    planner = real.policy.plan
    real.policy = replace(real.policy, plan=PlanCache(planner=planner))
    play = real.running(4, step=5)
    ready = asked_ahead(play, 5)
    found = ready.found
    play.lose(lost)
    play.settle(*(worker for worker in play.plan.workers if worker != lost))
    (form,) = play.ordered(Form)
    assert ready.found == found + 1
    assert lost not in form.plan.workers
    assert form.plan.world_size == 3


def test_the_plan_with_a_node_more_was_there_before_it_came(real: Play) -> None:
    real.policy = replace(real.policy, plan=PlanCache(planner=real.policy.plan))
    play = real.running(3, step=5)
    play.nodes("abcd")  # its worker is starting
    ready = asked_ahead(play, 4)
    found = ready.found
    play.ready()
    play.wait(4.0)
    assert isinstance(play.phase, Pausing)
    assert ready.found == found + 1


def test_nothing_is_asked_ahead_where_no_group_trains_or_nobody_comes(real: Play) -> None:
    play = real.begin(3)
    assert likely(play.state, play.policy, play.at, 0) is None
    play.ready()
    play.go()
    assert likely(play.state, play.policy, play.at, 3) is None


def test_the_loss_after_which_too_few_are_left_is_no_question(real: Play) -> None:
    play = real.running(2, step=5)
    alone = replace(play.policy, min_workers=2)
    assert [likely(play.state, alone, play.at, turn) for turn in range(3)] == [None] * 3
    one = replace(play.policy, min_workers=1)
    assert likely(play.state, one, play.at, 0) is not None
