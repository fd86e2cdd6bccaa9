"""Split backwards in the planner: less of a wait, more memory, and where they are not to be had."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic_train.config import Parallelism
from elastic_train.planner.choose_plan import choose
from elastic_train.planner.hardware import Hardware
from elastic_train.planner.model_shape import ModelShape
from elastic_train.planner.plan import WorkerSlot
from elastic_train.planner.problem import Problem
from elastic_train.planner.scoring import Scored
from tests.planner.models import transformer

pytestmark = pytest.mark.ring0


def best(
    shape: ModelShape, *, memory_bytes: int | None = None, zero_bubble: bool = True, **axes: int
) -> Scored:
    chosen = choose(
        Problem(
            worker_slots=tuple(WorkerSlot(worker=f"w{i}", node=f"n{i}") for i in range(4)),
            shape=shape,
            hardware=Hardware(memory_bytes=memory_bytes),
            micro_batches=8,
            constraints=Parallelism(**{"tp": 1, "pp": 4, "dp_shard": 1, "dp_replicate": 1} | axes),
            virtual=(1,),
            recompute=("none",),
            zero_bubble=zero_bubble,
        )
    )
    assert isinstance(chosen, tuple), chosen.reason
    return chosen[0]


def test_a_third_of_the_wait_is_left_and_the_plan_says_so() -> None:
    split, plain = best(transformer()), best(transformer(), zero_bubble=False)
    assert (split.plan.schedule, plain.plan.schedule) == ("ZeroBubble", "1F1B")
    assert split.cost.bubble == pytest.approx(plain.cost.bubble / 3)
    assert split.plan.stages == plain.plan.stages


def test_where_memory_is_short_the_last_stages_keep_fewer_micro_batches() -> None:
    shape = transformer(vocabulary=4096)  # the last stage has most to keep
    plain = best(shape, zero_bubble=False)
    assert best(shape).memory.training > plain.memory.training
    assert best(shape, memory_bytes=plain.memory.training).plan.schedule == "1F1B"


def test_short_micro_batches_are_not_worth_a_split() -> None:
    assert best(transformer(block_s=1e-3)).plan.schedule == "1F1B"


def test_what_is_sharded_or_frozen_has_nothing_to_split() -> None:
    assert best(transformer(), pp=2, dp_shard=2).plan.schedule == "1F1B"
    frozen = tuple(replace(tensor, trainable=False) for tensor in transformer().tensors)
    assert best(replace(transformer(), tensors=frozen)).plan.schedule == "1F1B"
