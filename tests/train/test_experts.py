"""Mixtures of experts compute under ep what one process computes, and move between plans by expert."""

from __future__ import annotations

import pytest
import torch

from elastic_train.config import Parallelism
from elastic_train.errors import ConfigError
from elastic_train.models.llama import Llama
from elastic_train.models.moe import MixtureOfExperts
from elastic_train.models.sizes import LlamaConfig, size
from elastic_train.planner.choose_plan import choose
from elastic_train.planner.hardware import Hardware, Link
from elastic_train.planner.plan import Infeasible, Mesh, Plan, WorkerSlot, even_shares
from elastic_train.planner.problem import Problem
from elastic_train.planner.rows import rows, tensors_of
from elastic_train.testing.gloo_pool import GlooPool
from elastic_train.train.parallel.experts import number_of_experts
from elastic_train.train.parallel.parallelize import check_rules
from elastic_train.train.profile import profiled_shape
from elastic_train.train.task import Rules
from tests.tasks.chain import ChainTask
from tests.train.equality import check, check_moves, spec

pytestmark = pytest.mark.ring2

EXPERTS = 6


def task(**changes: object) -> ChainTask:
    return ChainTask(**{"experts": EXPERTS, "hidden": 10, **changes})


PLANS = [
    (Mesh(dp_shard=4, ep=2), {}),  # three experts over two ranks
    (Mesh(pp=2, dp_shard=2, ep=2), {}),
    (Mesh(dp_shard=2, ep=2), {}),
    (Mesh(dp_replicate=2, dp_shard=2, ep=2), {"recompute": "full"}),
    (Mesh(dp_shard=3, ep=3), {"shares": ((0,), (), (1, 2, 3, 4))}),
    (Mesh(dp_shard=2, ep=2, tp=2), {}),
]


@pytest.mark.matrix
def test_every_kind_of_plan_with_ep_equals_the_reference(pool: GlooPool) -> None:
    check(pool, task(), PLANS, spec(max_steps=5))


@pytest.mark.matrix
def test_experts_move_between_plans_with_and_without_ep(pool: GlooPool) -> None:
    moves = [
        (Mesh(dp_shard=2, ep=2), [0, 1]),
        (Mesh(dp_shard=4, ep=2), [3, 0, 1, 2]),
        (Mesh(pp=2, tp=2), [2, 3, 1, 0]),
        (Mesh(dp_shard=3, ep=3), [0, 3, 2]),
    ]
    check_moves(pool, task(), moves)


def test_a_token_gets_the_same_whatever_else_is_in_its_micro_batch() -> None:
    config = LlamaConfig(dim=8, layers=1, heads=1, kv_heads=1, hidden=6, experts=5, experts_per_token=2)
    torch.manual_seed(0)
    layer = MixtureOfExperts(config).double()
    x = torch.randn(2, 7, 8, dtype=torch.float64)
    whole = layer(x)
    one_by_one = torch.stack([layer(token.view(1, 1, 8)).view(8) for token in x.flatten(0, 1)])
    torch.testing.assert_close(whole.flatten(0, 1), one_by_one, rtol=1e-12, atol=1e-15)
    # By hand: the two best experts of the first token, weighted by softmax over their scores.
    scores, chosen = layer.router(x[0, 0]).topk(2)
    by_hand = sum(
        weight
        * (
            layer.experts.down[e]
            @ (torch.nn.functional.silu(layer.experts.gate[e] @ x[0, 0]) * (layer.experts.up[e] @ x[0, 0]))
        )
        for weight, e in zip(scores.softmax(-1), chosen.tolist(), strict=True)
    )
    torch.testing.assert_close(whole[0, 0], by_hand, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    ("rules", "ep", "message"),
    [
        (Llama.rules(experts=True), 4, "4 ranks do not divide the model's 6 experts. Legal are 1, 2, 3, 6"),
        (Rules(), 2, "nothing says which modules of Llama stack experts"),
        (Rules(experts=("layers.*.mlp",)), 2, "'layers.0.mlp' does not stack experts"),
        (Rules(experts=("layers.*.experts.*.up",)), 2, "no module matches the experts"),
    ],
)
def test_what_ep_cannot_divide_is_refused_by_name(rules: Rules, ep: int, message: str) -> None:
    class Ruled(ChainTask):
        def parallelize(self) -> Rules:
            return rules

    names = tuple("abcd"[:ep])
    plan = Plan(mesh=Mesh(dp_shard=ep, ep=ep), workers=names, nodes=names, shares=even_shares(5, ep))
    with pytest.raises(ConfigError, match=message):
        check_rules(Ruled(experts=EXPERTS, hidden=10), spec(), plan)


def test_the_shipped_mixture_has_rules_for_its_experts() -> None:
    with torch.device("meta"):
        model = Llama(size("tiny_moe"))
    assert number_of_experts(model, Llama.rules(experts=True)) == 8
    assert number_of_experts(model, Llama.rules()) == 0


def test_the_planner_makes_ep_a_part_of_dp_shard() -> None:
    shape = profiled_shape(task(), spec(), flops_per_s=1e9)

    def planned(**asked: int) -> Plan | Infeasible:
        problem = Problem(
            worker_slots=tuple(WorkerSlot(worker=f"w{i}", node=f"n{i // 4}") for i in range(8)),
            shape=shape,
            hardware=Hardware(
                inside=Link(latency_s=0, bytes_per_s=1e9), between=Link(latency_s=0, bytes_per_s=1e8)
            ),
            micro_batches=12,
            constraints=Parallelism(**asked),
        )
        found = choose(problem)
        return found if isinstance(found, Infeasible) else found[0].plan

    plan = planned(ep=2)
    assert isinstance(plan, Plan)
    assert (plan.mesh.ep, plan.mesh.dp_shard % 2) == (2, 0)
    check_rules(task(), spec(), plan)
    for asked, words in (({"ep": 4}, "6 experts"), ({"ep": 2, "dp_shard": 3}, "3 ranks of dp_shard, which")):
        refused = planned(**asked)
        assert isinstance(refused, Infeasible)
        assert words in refused.reason
    # Of six experts a rank has three under ep 2, and half of those, rounded up, under dp_shard 4 beside it.
    table = tensors_of(shape)
    layer = [t for t in shape.tensors if t.layer == 1]
    stacks = sum(t.numel for t in layer if t.expert) * 8 / 6
    held = [rows(table, mesh).weights[1] for mesh in (Mesh(), Mesh(dp_shard=2, ep=2), Mesh(dp_shard=4, ep=2))]
    assert held[0] - held[1] >= 3 * stacks
    assert held[1] - held[2] >= 1 * stacks
