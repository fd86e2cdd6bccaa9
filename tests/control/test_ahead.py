"""Plans that were made ahead are those that a run asks for, and no others than it would get anyway."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic_train.control.commands import Form
from elastic_train.control.membership import seats
from elastic_train.planner.ready import Ready
from tests.control.conftest import Play

pytestmark = pytest.mark.ring0


@pytest.mark.parametrize("lost", ["w0002", "w0004"])
def test_the_plan_after_a_loss_was_there_before_it(replicated: Play, lost: str) -> None:
    planner = replicated.policy.plan
    ready = Ready(planner)
    replicated.policy = replace(replicated.policy, plan=ready)
    play = replicated.running(4, step=5)
    ready.prepare(seats(play.facts, play.plan))
    asked = ready.found
    left = tuple(seat for seat in seats(play.facts, play.plan) if seat.worker != lost)
    play.lose(lost)
    play.settle(*(worker for worker in play.plan.workers if worker != lost))
    (form,) = play.ordered(Form)
    assert ready.found == asked + 1
    assert lost not in form.plan.workers
    assert form.plan == planner(left)


def test_the_plan_with_a_node_more_was_there_before_it_came(replicated: Play) -> None:
    planner = replicated.policy.plan
    ready = Ready(planner)
    replicated.policy = replace(replicated.policy, plan=ready)
    play = replicated.running(3, step=5)
    ready.prepare(seats(play.facts, play.plan))
    play.nodes("abcd")
    play.ready()
    more = seats(play.facts, play.plan)
    assert len(more) == 4
    assert ready(more) == planner(more)
    assert ready.found > 0
