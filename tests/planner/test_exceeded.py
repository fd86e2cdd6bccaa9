"""A plan that a device's memory was too small for, and all that are predicted to need as much, are left."""

from __future__ import annotations

import pytest

from elastic_train.planner.plan import Infeasible, Plan
from elastic_train.planner.question import Planned, Question
from elastic_train.planner.scoring import memory_of
from elastic_train.planner.search import Search
from tests.planner.models import transformer
from tests.planner.test_choose import SLOW
from tests.planner.test_search import MODEL, worker_slots

pytestmark = pytest.mark.ring0


def planned(planner: Search, question: Question) -> Plan:
    found = planner(question)
    assert isinstance(found, Planned), found.reason
    return found.plan


def test_where_nobody_knows_the_memory_a_plan_that_was_too_large_is_cut_further() -> None:
    planner = Search(micro_batches=12, shape=MODEL)
    found: list[Plan] = []
    for _ in range(3):
        found.append(planned(planner, Question(worker_slots=worker_slots(4), exceeded=tuple(found))))
    assert [plan.mesh.dp_shard for plan in found] == [1, 2, 4]
    last = planner(Question(worker_slots=worker_slots(4), exceeded=tuple(found)))
    assert isinstance(last, Infeasible)
    more = planned(planner, Question(worker_slots=worker_slots(8), exceeded=tuple(found)))
    assert more.mesh.dp_shard > 4
    stays = Question(worker_slots=worker_slots(4), held=found[0], exceeded=tuple(found[:1]))
    assert planned(planner, stays).mesh.dp_shard > 1, "what is held is not kept either"


def test_the_whole_search_leaves_everything_that_is_predicted_to_need_as_much() -> None:
    planner = Search(micro_batches=12, shape=transformer(), hardware=SLOW)
    free = Question(worker_slots=worker_slots(8))
    found: list[Plan] = []
    needed: list[int] = []
    for _ in range(3):
        plan = planned(planner, Question(worker_slots=worker_slots(8), exceeded=tuple(found)))
        problem = planner.problem(free)
        assert problem is not None
        found.append(plan)
        needed.append(memory_of(problem, plan).training)
    assert needed[0] > needed[1] > needed[2]
