"""What context parallelism divides, what it holds several times, and what its exchanges take."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from elastic_train.config import Parallelism
from elastic_train.planner.hardware import Link
from elastic_train.planner.model_shape import Widths
from elastic_train.planner.plan import Mesh
from elastic_train.planner.rows import activations, rows, seconds, tensors_of
from elastic_train.planner.stage_memory import StageMemory
from elastic_train.planner.state_moves import HeldParts, needed, shared
from tests.planner.models import transformer
from tests.planner.test_choose import best, problem, refusal

pytestmark = pytest.mark.ring0

SHAPE = transformer()
LINK = Link(latency_s=0.5, bytes_per_s=1024.0)


def test_positions_divide_what_is_kept_and_the_state_only_where_it_is_sharded():
    table = tensors_of(SHAPE)
    for recompute in ("none", "selective", "full"):
        whole = activations(SHAPE, Mesh(), recompute)
        np.testing.assert_allclose(activations(SHAPE, Mesh(cp=4), recompute), whole / 4)
    assert np.array_equal(rows(table, Mesh(cp=2)).state, rows(table, Mesh()).state)
    assert np.array_equal(rows(table, Mesh(dp_shard=2, cp=2)).state, rows(table, Mesh(dp_shard=4)).state)


@pytest.mark.parametrize(("recompute", "passes"), [("none", 2), ("full", 3)])
def test_queries_keys_values_and_the_result_are_exchanged_in_each_pass(recompute, passes):
    """By hand: 2 keys for 4 queries, of which the keys are repeated where 4 ranks divide them."""
    boundary = SHAPE.boundary_bytes
    for ranks, keys in ((2, 1 / 2), (4, 1.0)):
        each, moved = seconds(SHAPE, Mesh(cp=ranks), recompute, LINK)
        part = boundary / ranks / ranks
        one = 2 * (LINK.seconds(part) + LINK.seconds(part * keys))
        assert moved[1] == pytest.approx(passes * (ranks - 1) * one)
        assert moved[0] == moved[-1] == 0
        assert each[0] == 0
        np.testing.assert_allclose(each, seconds(SHAPE, Mesh(), recompute, LINK)[0] / ranks)


def test_what_goes_in_and_out_of_a_stage_is_whole():
    """The first of two stages has two micro-batches in flight, and hands each on."""
    arriving_and_leaving = 2 * SHAPE.boundary_bytes

    def kept(mesh: Mesh) -> int:
        memory = StageMemory(tensors_of(SHAPE), mesh, "none", accumulates=True)
        return memory.of((0, 5, 10), 2).activations - arriving_and_leaving

    assert kept(Mesh(pp=2, cp=2)) == kept(Mesh(pp=2)) / 2 + 2 * SHAPE.boundary_bytes


def test_ranks_of_cp_share_all_they_hold_or_divide_it():
    blocks = (0.0, 96.0, 0.0)
    copies, shards = HeldParts(mesh=Mesh(cp=2)), HeldParts(mesh=Mesh(dp_shard=2, cp=2))
    assert needed(copies, blocks).tolist() == [96.0] * 2
    assert needed(shards, blocks).tolist() == [24.0] * 4
    assert shared(copies, copies, blocks).tolist() == [[96.0] * 2] * 2
    assert shared(copies, shards, blocks).tolist() == [[24.0] * 4] * 2
    assert np.array_equal(shared(shards, shards, blocks), 24.0 * np.eye(4))


@pytest.mark.parametrize(
    ("tp", "cp", "words"),
    [
        (1, 4, ""),  # two key and value heads, each twice
        (2, 2, ""),
        (1, 3, "3 ranks do not divide the 4 heads"),
        (2, 4, "4 ranks do not divide the 2 heads of each tp=2"),
    ],
)
def test_heads_bound_the_ranks_together_with_tp(tp, cp, words):
    assert Widths(heads=4, kv_heads=2).heads_problem(tp, cp) == words


def test_keys_that_the_ranks_neither_divide_nor_repeat_are_told():
    words = "2 ranks neither divide the 3 key and value heads nor are a multiple of them"
    assert Widths(heads=6, kv_heads=3).heads_problem(1, 2) == words
    assert Widths(heads=6, kv_heads=3).heads_problem(1, 6) == ""


def test_cp_is_planned_where_it_is_asked_for_and_by_rules_alone():
    plan = best(problem(4, constraints=Parallelism(cp=2))).plan
    assert plan.mesh.cp == 2
    without = replace(transformer(), sequence=0)
    reason = refusal(problem(4, shape=without, constraints=Parallelism(cp=2)))
    assert "the model has no rules for it, or its positions are not known" in reason
    reason = refusal(problem(4, shape=with_experts(), constraints=Parallelism(cp=2, ep=2)))
    assert "cp=2 is not possible with ep=2" in reason


def with_experts():
    shape = transformer()
    assert shape.widths is not None
    return replace(shape, widths=replace(shape.widths, experts=4))
