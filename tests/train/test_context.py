"""Context parallelism computes what one process computes, whatever it is combined with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from elastic_train.config import Checkpoints
from elastic_train.errors import ConfigError
from elastic_train.planner.plan import Mesh, Plan, even_shares
from elastic_train.testing.gang import From, Gang
from elastic_train.testing.gloo_pool import GlooPool
from elastic_train.testing.reference import assert_state_near, reference
from elastic_train.train.model.dropout import Slice
from elastic_train.train.model.positions import (
    asking,
    divided_positions,
    own_positions,
    part_of_masks,
    position_numbers,
)
from elastic_train.train.parallel.parallelize import check_rules
from elastic_train.train.task import Rules, Task
from tests.tasks.chain import ChainTask
from tests.tasks.own_attention import Grouped, GroupedTask
from tests.train.equality import SPLITS, check, check_moves, spec
from tests.train.test_resume_on_other_plan import commit, restored

pytestmark = pytest.mark.ring2

SPREAD = {"sequence_parallel": True}
PLANS: list[tuple[Mesh, dict[str, Any]]] = [
    (Mesh(cp=4), {"recompute": "full"}),
    (Mesh(cp=2, tp=2), SPREAD),
    (Mesh(pp=2, cp=2), {}),
    (Mesh(cp=2), {"recompute": "selective"}),
    (Mesh(cp=2, tp=2), {"recompute": "full"}),
    (Mesh(dp_shard=2, cp=2), {}),
    (Mesh(dp_replicate=2, cp=2), {}),
    (Mesh(pp=2, cp=2), {"stages": ((0, 4), (4, 4))}),  # no attention on the last
]


def chain(**changes: Any) -> ChainTask:
    """Two heads of keys and values, fewer than the ranks of some plans, and positions that 4 ranks divide."""
    return ChainTask(**{"length": 8, "kv_heads": 2, **changes})


def test_positions_divided_over_cp_compute_what_one_process_computes(pool: GlooPool) -> None:
    check(pool, chain(evaluate_every=2), PLANS[:3])


@pytest.mark.matrix
def test_positions_are_divided_under_every_kind_of_plan(pool: GlooPool) -> None:
    check(pool, chain(evaluate_every=2), PLANS[3:])


def test_a_model_of_its_own_takes_part_and_is_measured_whole(pool: GlooPool) -> None:
    run = spec()
    gang = Gang(pool, GroupedTask(), run)
    gang.form(gang.plan(1, 1))
    expected = reference(GroupedTask(), run, gang.whole())
    alone = gang.run()
    gang.form(gang.plan_on(Mesh(dp_shard=2, cp=2)))
    found = gang.run()
    steps = {r.step: r.loss for r in found}  # one with an evaluation is told again
    np.testing.assert_allclose(list(steps.values()), expected.losses, rtol=1e-9)
    assert_state_near(gang.whole(), expected.state)
    for one, other in zip(alone, found, strict=True):
        assert [name for name, _ in other.metrics] == [name for name, _ in one.metrics]
        np.testing.assert_allclose([v for _, v in other.metrics], [v for _, v in one.metrics], rtol=1e-9)
    assert {name for r in found for name, _ in r.metrics} == {"ends", "spread", "most"}


@pytest.mark.parametrize(
    "mesh",
    [
        Mesh(dp_shard=2, cp=2),
        pytest.param(Mesh(cp=2), marks=pytest.mark.matrix),
        pytest.param(Mesh(cp=2, tp=2), marks=pytest.mark.matrix),
        pytest.param(Mesh(pp=2, cp=2), marks=pytest.mark.matrix),
    ],
    ids=str,
)
def test_parameters_are_updated_in_backward_under_cp_to_the_bit(pool: GlooPool, mesh: Mesh) -> None:
    found = []
    for early in (False, True):
        gang = Gang(pool, chain(), spec(optimizer_in_backward=early, precision="fp32", clip_norm=None))
        gang.form(gang.plan_on(mesh, stages=SPLITS[mesh.pp]))
        found.append(([r.loss for r in gang.run()], gang.whole()))
    (losses, state), (early_losses, early_state) = found
    assert early_losses == losses
    assert early_state.keys() == state.keys()
    assert all(np.array_equal(early_state[name], state[name]) for name in state)


MOVES = [
    (Mesh(cp=2), [0, 1]),
    (Mesh(dp_shard=2, cp=2), [3, 0, 1, 2]),
    (Mesh(dp_replicate=3), [1, 0, 2]),
    (Mesh(pp=2, cp=2), [2, 3, 1, 0]),
    (Mesh(cp=2, tp=2), [0, 3, 2, 1]),
    (Mesh(dp_shard=3), [0, 3, 2]),
]


@pytest.mark.parametrize("moves", [MOVES[:3], pytest.param(MOVES[2:], marks=pytest.mark.matrix)])
def test_a_run_moves_to_cp_and_away_from_it_without_a_bit_changed(
    pool: GlooPool, moves: list[tuple[Mesh, list[int]]]
) -> None:
    check_moves(pool, chain(), moves)


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        (Mesh(dp_shard=2, cp=2), Mesh(dp_replicate=2)),
        pytest.param(Mesh(cp=2), Mesh(dp_shard=2, cp=2), marks=pytest.mark.matrix),
        pytest.param(Mesh(tp=2), Mesh(cp=4), marks=pytest.mark.matrix),
    ],
)
def test_what_is_saved_under_cp_goes_on_without_it_and_the_other_way(
    pool: GlooPool, tmp_path: Path, saved: Mesh, resumed: Mesh
) -> None:
    gang = Gang(pool, chain(), spec(checkpoints=Checkpoints(every=2), max_steps=4))
    gang.form(gang.plan_on(saved))
    expected = [r.loss for r in gang.run()]
    commit(gang, tmp_path.as_uri(), 2)
    plan = gang.plan_on(resumed)
    gang.join(plan, range(plan.world_size))
    found = pool.run(restored, tmp_path.as_uri(), ranks=gang.processes, timeout=120)
    assert {notes for _, notes in found} == {()}
    np.testing.assert_allclose([r.loss for r in gang.run()], expected[2:], rtol=1e-9)


def test_a_group_that_breaks_under_cp_goes_on_from_the_rank_that_is_left(pool: GlooPool) -> None:
    gang = Gang(pool, chain(), spec(max_steps=5, compare_replicas=None))
    plan = gang.plan_on(Mesh(cp=2))
    gang.form(plan)
    expected = [r.loss for r in gang.run()]
    gang.form(plan)
    running = gang.begin_until(1, "backward", 3)
    pool.kill(1)
    gang.abort([0])
    _, error, reports = running.results(ranks=[0])[0]
    assert error.startswith("GroupBroken")
    assert [r.step for r in reports] == [1, 2]
    origin = From(generation=gang.generation, step=2, holders=(0,))
    gang.form(gang.plan_on(Mesh(dp_replicate=3)), [0, 2, 3], origin)
    losses = [r.loss for r in (*reports, *gang.run())]
    np.testing.assert_allclose(losses, expected, rtol=1e-9)


class WithNorm(Grouped):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)


@dataclass
class Ruled(GroupedTask):
    """The task with other rules, or another model."""

    rules: Rules
    build: Callable[[], nn.Module] = Grouped

    def model(self) -> nn.Module:
        return self.build()

    def parallelize(self) -> Rules:
        return self.rules


MIX = Rules(attention=("layers.*.mix",))


@pytest.mark.parametrize(
    ("task", "mesh", "message"),
    [
        (Ruled(Rules()), Mesh(cp=2), "nothing says in which modules of Grouped positions meet"),
        (Ruled(Rules(attention=("layers.*.blend",))), Mesh(cp=2), "no module matches the attention"),
        (Ruled(Rules(attention=("layers.*",))), Mesh(cp=2), "'layers.0' has parameters"),
        (Ruled(MIX, WithNorm), Mesh(cp=2), "'norm' is a BatchNorm1d, which normalises over positions"),
        (ChainTask(experts=4, hidden=10), Mesh(dp_shard=2, cp=2, ep=2), "experts move between ranks"),
        (ChainTask(), Mesh(cp=3), "3 ranks do not divide the 4 heads. Legal are 1, 2, 4"),
        (ChainTask(), Mesh(cp=4, tp=2), "4 ranks do not divide the 2 heads of each tp=2. Legal are 1, 2"),
    ],
)
def test_what_cp_cannot_divide_is_refused_by_name(task: Task, mesh: Mesh, message: str) -> None:
    names = tuple("abcdefgh"[: mesh.size])
    plan = Plan(mesh=mesh, workers=names, nodes=names, shares=even_shares(5, mesh.dp))
    with pytest.raises(ConfigError, match=message):
        check_rules(task, spec(), plan)


class Unasked(GroupedTask):
    """Compares what is here with what is not."""

    def loss(self, output: Tensor, micro_batch: dict[str, Tensor]) -> tuple[Tensor, int]:
        return output.square().sum(), micro_batch["targets"].numel()


class Dropping(GroupedTask):
    def model(self) -> nn.Module:
        return Grouped(dropout=0.5)


@pytest.mark.parametrize(
    ("task", "ranks", "message"),
    [
        (Unasked(), 2, "ConfigError: task.loss: it is given the model's output for a part of the positions"),
        (Dropping(), 2, "'layers.0.mix' draws random numbers for the heads that are here"),
        pytest.param(
            chain(length=6),
            4,
            "4 ranks do not divide the 6 positions of a micro-batch",
            marks=pytest.mark.matrix,
        ),
    ],
)
def test_what_only_a_step_shows_is_refused_in_the_first(
    pool: GlooPool, task: Task, ranks: int, message: str
) -> None:
    gang = Gang(pool, task, spec())
    gang.form(gang.plan_on(Mesh(cp=ranks)))
    with pytest.raises(AssertionError, match=message):
        gang.run()


def test_a_part_of_the_positions_knows_which_it_is() -> None:
    whole = torch.arange(12).view(1, 12)
    assert own_positions(whole) is whole
    assert position_numbers(whole).tolist() == list(range(12))
    with divided_positions(Slice(2, 3)):
        here = own_positions(whole)
        assert here.tolist() == [[8, 9, 10, 11]]
        assert torch.equal(position_numbers(here), here[0])
        with pytest.raises(ConfigError, match=r"3 ranks do not divide the 11 positions .* Legal are 1, 11"):
            own_positions(whole[:, 1:])
        with pytest.raises(ConfigError, match="did not ask which part"), asking("task.loss"):
            position_numbers(here)
    assert own_positions(whole) is whole


def test_masks_are_divided_over_cp_and_then_over_tp() -> None:
    assert part_of_masks(None, None) is None
    assert part_of_masks(Slice(1, 2), None) == Slice(1, 2)
    assert part_of_masks(None, Slice(1, 2)) == Slice(1, 2)
    assert part_of_masks(Slice(1, 2), Slice(0, 3)) == Slice(3, 6)
