"""Sequence parallelism and a loss in parts compute what one process computes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from elastic_train.errors import ConfigError
from elastic_train.models.llama import Llama
from elastic_train.planner.plan import Mesh, Plan, even_shares
from elastic_train.testing.gang import Gang
from elastic_train.testing.gloo_pool import GlooPool
from elastic_train.train.model.dropout import Slice, keyed_dropout
from elastic_train.train.parallel.parallelize import check_rules
from elastic_train.train.profile import profiled_shape
from elastic_train.train.task import Rules
from tests.tasks.chain import ChainTask
from tests.train.equality import check, spec

pytestmark = pytest.mark.ring2

SPREAD = {"sequence_parallel": True}
PLANS = [
    (Mesh(pp=2, tp=2), {**SPREAD, "recompute": "full"}),
    (Mesh(dp_shard=2, tp=2), SPREAD),
    (Mesh(tp=2), SPREAD),
    (Mesh(dp_replicate=2, tp=2), SPREAD),
]


@pytest.mark.matrix
def test_positions_are_divided_under_every_kind_of_plan(pool: GlooPool) -> None:
    check(pool, ChainTask(), PLANS)


def test_a_part_of_the_positions_gets_its_part_of_the_mask() -> None:
    whole = torch.ones(3, 8, 5)
    masks = []
    for part in (None, Slice(0, 2), Slice(1, 2)):
        torch.manual_seed(4)
        here = whole if part is None else whole.chunk(2, 1)[part.index]
        with keyed_dropout(part):
            masks.append(torch.nn.functional.dropout(here, 0.5))
    assert torch.equal(masks[0], torch.cat(masks[1:], 1))
    assert 0 < masks[0].count_nonzero() < whole.numel()


def test_positions_that_do_not_divide_are_refused_and_not_planned(pool: GlooPool) -> None:
    shape = profiled_shape(ChainTask(), spec(), flops_per_s=1e9)
    assert [tp for tp in (1, 2, 3, 4) if shape.divides_positions(tp)] == [2, 3]
    gang = Gang(pool, ChainTask(), spec())
    gang.form(gang.plan_on(Mesh(tp=4), sequence_parallel=True))
    with pytest.raises(AssertionError, match="4 ranks do not divide the 6 positions that 'embed'"):
        gang.run()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sequence": {}}, "nothing says which modules work on each position by itself"),
        ({"sequence": {"head": "gathered"}}, "'layers.0.attention.wq' needs all positions"),
        ({"sequence": {"tail": "alone"}}, "no module matches 'tail'"),
        ({"sequence": {"head": "apart"}}, "'apart' of 'head' is neither"),
    ],
)
def test_rules_that_say_too_little_of_positions_are_refused(changes: dict[str, Any], message: str) -> None:
    class Ruled(ChainTask):
        def parallelize(self) -> Rules:
            return replace(Llama.rules(), **changes)

    plan = Plan(
        mesh=Mesh(tp=2),
        workers=("a", "b"),
        nodes=("a", "a"),
        shares=even_shares(5, 1),
        sequence_parallel=True,
    )
    with pytest.raises(ConfigError, match=message):
        check_rules(Ruled(), spec(), plan)
