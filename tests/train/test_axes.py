"""Tensor and pipeline parallel plans compute what one process computes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from elastic_train.config import Batch
from elastic_train.planner.plan import Mesh
from elastic_train.testing.gang import Gang
from elastic_train.testing.gloo_pool import GlooPool
from elastic_train.testing.reference import assert_state_near, reference
from tests.tasks.chain import ChainTask
from tests.tasks.fused import FusedTask
from tests.train.equality import SPLITS, check, check_moves, spec

pytestmark = pytest.mark.ring2

ALL_OF_FOUR = [
    Mesh(dp_replicate=4),
    Mesh(dp_shard=4),
    Mesh(dp_replicate=2, dp_shard=2),
    Mesh(tp=4),
    Mesh(pp=4),
    Mesh(pp=2, tp=2),
    Mesh(dp_replicate=2, tp=2),
    Mesh(dp_shard=2, tp=2),
    Mesh(pp=2, dp_replicate=2),
    Mesh(pp=2, dp_shard=2),
]
FULL = {"recompute": "full"}


def test_every_factorisation_of_four_workers_equals_the_reference(pool: GlooPool) -> None:
    """With metrics, and with two blocks of a stage computed again: their masks are the same."""
    assert all(mesh.size == 4 for mesh in ALL_OF_FOUR)
    plans = [(mesh, FULL if mesh == Mesh(pp=2, dp_shard=2) else {}) for mesh in ALL_OF_FOUR]
    check(pool, ChainTask(evaluate_every=2), plans)


@pytest.mark.matrix
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_an_untied_head_and_recomputed_blocks_change_nothing_under_any_plan(
    pool: GlooPool, recompute: str
) -> None:
    plans = [(mesh, {"recompute": recompute}) for mesh in (*ALL_OF_FOUR, Mesh(pp=3), Mesh())]
    check(pool, ChainTask(tied=False), plans)


@pytest.mark.parametrize(
    ("optimizer", "settings", "meshes"),
    [
        ("SGD", {"lr": 0.1, "momentum": 0.9}, [Mesh(pp=3), Mesh(tp=2)]),
        ("Adagrad", {"lr": 1e-2}, [Mesh(pp=2), Mesh(tp=2)]),
        # It looks at whole tensors, and runs where they are whole.
        ("Adafactor", {"lr": 1e-2}, [Mesh(pp=2, dp_replicate=2), Mesh(dp_replicate=3)]),
    ],
)
def test_other_optimizers_and_an_untied_head_on_a_stage_of_its_own(
    pool: GlooPool,
    optimizer: str,
    settings: dict[str, float],
    meshes: list[Mesh],
) -> None:
    task = ChainTask(optimizer_name=optimizer, settings=settings, tied=optimizer != "SGD")
    check(pool, task, [(mesh, {}) for mesh in meshes])


class OneGroup(ChainTask):
    """What tp cuts and what it leaves whole in one group, as most people have it."""

    def optimizer(self, named_params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for _, p in named_params], **self.settings)


@pytest.mark.parametrize("kernel", ["foreach", "fused"])
def test_kernels_of_many_tensors_run_where_tensors_of_a_group_are_cut_differently(
    pool: GlooPool, kernel: str
) -> None:
    """On GPUs torch chooses such a kernel by itself."""
    task = OneGroup(settings={"lr": 1e-2, kernel: True})
    check(pool, task, [(mesh, {}) for mesh in (Mesh(tp=2), Mesh(dp_shard=2, tp=2))])
    check_moves(pool, task, [(Mesh(tp=2), [0, 1]), (Mesh(dp_shard=2), [1, 0]), (Mesh(tp=2), [1, 0])])


class AllAtOnce(ChainTask):
    """An optimizer of one's own that moves all parameters in one call."""

    def optimizer(self, named_params: Any) -> torch.optim.Optimizer:
        return Descent([p for _, p in named_params], {"lr": 1e-2})


class Descent(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            moved = [p for p in group["params"] if p.grad is not None]
            torch._foreach_add_(moved, [p.grad for p in moved], alpha=-group["lr"])  # type: ignore[attr-defined]


def test_an_optimizer_of_ones_own_that_takes_them_in_one_call_is_refused_by_name(pool: GlooPool) -> None:
    gang = Gang(pool, AllAtOnce(), spec())
    gang.form(gang.plan_on(Mesh(tp=2)))
    with pytest.raises(AssertionError, match=r"ConfigError: task.optimizer: .*tp=1"):
        gang.run()


@pytest.mark.matrix
def test_uneven_shares_and_an_idle_index_of_a_pipeline_change_nothing(pool: GlooPool) -> None:
    task, run = ChainTask(), spec(max_steps=5)
    gang = Gang(pool, task, run)
    expected = None
    for mesh in (Mesh(pp=2, dp_replicate=2), Mesh(pp=2, dp_shard=2), Mesh(dp_shard=2, tp=2)):
        for shares in (((0,), (1, 2, 3, 4)), ((), (0, 1, 2, 3, 4))):
            gang.form(gang.plan_on(mesh, shares=shares, stages=SPLITS[mesh.pp]))
            expected = expected or reference(task, run, gang.whole())
            reports = gang.run()
            np.testing.assert_allclose([r.loss for r in reports], expected.losses, rtol=1e-9)
            assert_state_near(gang.whole(), expected.state)


def test_fused_projections_are_cut_part_by_part(pool: GlooPool) -> None:
    stages = {"stages": ((0, 1), (1, 2))}
    check(pool, FusedTask(), [(Mesh(dp_shard=2, tp=2), {}), (Mesh(pp=2, tp=2), stages)])


def test_a_run_moves_between_plans_of_all_axes_without_a_change_of_its_losses(pool: GlooPool) -> None:
    moves = [
        (Mesh(pp=2, tp=2), [0, 1, 2, 3]),
        (Mesh(dp_shard=3), [1, 2, 3]),
        (Mesh(pp=3), [3, 0, 1]),
        (Mesh(dp_replicate=2, tp=2), [0, 1, 2, 3]),
        (Mesh(pp=2, dp_shard=2), [2, 3, 1, 0]),
        (Mesh(), [2]),
    ]
    check_moves(pool, ChainTask(), moves)


TEN_PLANS = [
    (Mesh(pp=2, tp=2), [0, 1, 2, 3]),
    (Mesh(dp_shard=3), [1, 2, 3]),
    (Mesh(pp=3), [3, 4, 1]),
    (Mesh(dp_replicate=2, tp=2), [0, 1, 2, 3]),
    (Mesh(), [2]),
    (Mesh(dp_replicate=7), [2, 0, 1, 3, 4, 5, 6]),
    (Mesh(pp=2, dp_shard=3), [6, 5, 4, 3, 2, 1]),
    (Mesh(dp_shard=2, tp=2), [1, 3, 5, 0]),
    (Mesh(pp=4), [0, 1, 2, 5]),
    (Mesh(dp_replicate=2, dp_shard=2), [5, 2, 4, 3]),
]


@pytest.fixture
def seven(pool: GlooPool) -> Iterator[GlooPool]:
    """The pool with three processes more."""
    size = pool.size
    pool.resize(7)
    yield pool
    pool.resize(size)


@pytest.mark.matrix
def test_ten_plans_one_after_the_other_give_the_same_bits_twice(seven: GlooPool) -> None:
    run = spec(max_steps=2 * len(TEN_PLANS), batch=Batch(global_size=13, micro_size=1, seed=11))
    gang = Gang(seven, ChainTask(), run)
    gang.form(gang.plan(1, 1))
    expected = [r.loss for r in gang.run()]
    rounds: list[list[float]] = []
    for _ in range(2):
        origin, losses = None, []
        for number, (mesh, processes) in enumerate(TEN_PLANS, start=1):
            gang.form(gang.plan_on(mesh, stages=SPLITS[mesh.pp]), processes, origin)
            last = number == len(TEN_PLANS)
            losses += [r.loss for r in (gang.run() if last else gang.pause_at(2 * number))]
            origin = gang.held()
        rounds.append(losses)
    final = gang.whole()
    np.testing.assert_allclose(rounds[0], expected, rtol=1e-9)
    assert rounds[0] == rounds[1]
    assert all(np.isfinite(value.astype(float)).all() for value in final.values())
