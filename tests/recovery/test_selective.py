"""What a run logs under a budget: chosen with each plan, and part of it."""

from __future__ import annotations

from itertools import pairwise

import pytest

from elastic_train.planner.model_shape import Layer, ModelShape, TensorShape
from elastic_train.planner.plan import Infeasible, Mesh, Plan, WorkerSlot
from elastic_train.planner.question import Planned, Question
from elastic_train.recovery.selective_logging import Selective

pytestmark = pytest.mark.ring0

BLOCKS, MICRO_BATCHES, INTERVAL, ACTIVATION = 4, 8, 10, 1000
EDGE = 2 * MICRO_BATCHES * ACTIVATION * INTERVAL
"""Bytes that cross a boundary between two checkpoints."""


def shape(*seconds: float) -> ModelShape:
    layers = tuple(
        Layer(name=f"layers.{n}", seconds=s, activation_bytes=0, block=True) for n, s in enumerate(seconds)
    )
    tensor = TensorShape(fqn="w", shape=(4, 4), item_bytes=4)
    return ModelShape(tensors=(tensor,), layers=layers, boundary_bytes=ACTIVATION)


def pipeline(question: Question) -> Planned | Infeasible:
    """One stage a worker slot."""
    worker_slots = question.worker_slots
    if not worker_slots:
        return Infeasible(reason="nobody is there")
    edges = [BLOCKS * n // len(worker_slots) for n in range(len(worker_slots) + 1)]
    plan = Plan(
        mesh=Mesh(pp=len(worker_slots)),
        workers=tuple(slot.worker for slot in worker_slots),
        nodes=tuple(slot.node for slot in worker_slots),
        shares=(tuple(range(MICRO_BATCHES)),),
        stages=tuple(pairwise(edges)) if len(worker_slots) > 1 else (),
    )
    return Planned(plan=plan, reason="one stage each")


def asked(workers: int) -> Question:
    return Question(worker_slots=tuple(WorkerSlot(worker=f"w{n}", node=f"n{n}") for n in range(workers)))


def groups(budget: int, workers: int, *seconds: float) -> tuple[tuple[int, int], ...]:
    planner = Selective(
        planner=pipeline,
        shape=shape(*seconds),
        micro_batches=MICRO_BATCHES,
        interval=INTERVAL,
        bytes_s=1e12,
        budget=budget,
    )
    planned = planner(asked(workers))
    assert isinstance(planned, Planned)
    return planned.plan.groups


def test_a_budget_for_everything_groups_nothing() -> None:
    assert groups(3 * EDGE, 4, 1, 1, 1, 1) == ()
    assert groups(0, 1, 1, 1, 1, 1) == ()


def test_the_boundary_that_saves_least_recovery_is_given_up_first() -> None:
    assert groups(2 * EDGE, 4, 1, 1, 5, 5) == ((0, 2), (2, 3), (3, 4))
    assert groups(2 * EDGE, 4, 5, 5, 1, 1) == ((0, 1), (1, 2), (2, 4))
    assert groups(EDGE, 4, 1, 1, 1, 1) == ((0, 2), (2, 4))
    assert groups(EDGE - 1, 4, 1, 1, 1, 1) == ((0, 4),)


def test_each_plan_has_its_own_choice() -> None:
    assert groups(EDGE, 4, 1, 1, 1, 1) == ((0, 2), (2, 4))
    assert groups(EDGE, 2, 1, 1, 1, 1) == (), "a shorter pipeline has one boundary, and that fits"


def test_what_the_plan_says_of_its_groups_is_for_people_too() -> None:
    planner = Selective(
        planner=pipeline,
        shape=shape(1, 1, 1, 1),
        micro_batches=MICRO_BATCHES,
        interval=INTERVAL,
        bytes_s=1e12,
        budget=EDGE,
    )
    planned = planner(asked(4))
    assert isinstance(planned, Planned)
    assert str(planned.plan) == "pp 4 on 4 nodes, stages 0 to 1, 2 to 3 replayed together"
    assert isinstance(planner(asked(0)), Infeasible)
