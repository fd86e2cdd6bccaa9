"""Tensor and pipeline parallel plans compute what one process computes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from elastic_train.config import Batch, RunSpec
from elastic_train.planner.plan import Mesh, Recompute
from elastic_train.testing.chain import ChainTask
from elastic_train.testing.fused import FusedTask
from elastic_train.testing.gang import Gang
from elastic_train.testing.gloo_pool import GlooPool
from elastic_train.testing.reference import assert_state_near, reference

pytestmark = pytest.mark.ring2

SPLITS = {1: (), 2: ((0, 1), (1, 4)), 3: ((0, 2), (2, 4), (4, 4)), 4: ((0, 1), (1, 2), (2, 3), (3, 4))}
"""Blocks by stage: uneven, and with a stage that is the head alone."""


def spec(**changes: object) -> RunSpec:
    return RunSpec(
        **{
            "name": "chain",
            "storage_path": "/nowhere",
            "batch": Batch(global_size=13, micro_size=3, seed=11),
            "max_steps": 5,
            "min_workers": 1,
            "max_workers": 4,
            "precision": "fp64",
            "clip_norm": 2.0,
            **changes,
        }
    )


def check(
    pool: GlooPool,
    generations: Iterator[int],
    task: ChainTask,
    meshes: list[Mesh],
    recompute: Recompute = "none",
    splits: dict[int, tuple[tuple[int, int], ...]] = SPLITS,
) -> None:
    run = spec(max_steps=3)  # with the end of an epoch: a step of two micro-batches, one of them padded
    gang = Gang(pool, generations, task, run)
    gang.form(gang.plan(1, 1))
    initial = gang.whole()
    expected = reference(task, run, initial)
    for mesh in meshes:
        gang.form(gang.plan_on(mesh, stages=splits[mesh.pp], recompute=recompute))
        started = gang.whole()
        assert started.keys() == initial.keys(), mesh
        assert all(np.array_equal(started[name], initial[name]) for name in initial), mesh
        reports = gang.run()
        losses, norms = [r.loss for r in reports], [r.grad_norm for r in reports]
        np.testing.assert_allclose(losses, expected.losses, rtol=1e-9, err_msg=str(mesh))
        np.testing.assert_allclose(norms, expected.norms, rtol=1e-9, err_msg=str(mesh))
        assert_state_near(gang.whole(), expected.state)


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


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.matrix)])
def test_every_factorisation_of_four_workers_equals_the_reference(
    pool: GlooPool, new_generation: Iterator[int], tied: bool
) -> None:
    assert all(mesh.size == 4 for mesh in ALL_OF_FOUR)
    check(pool, new_generation, ChainTask(tied=tied), ALL_OF_FOUR)


@pytest.mark.parametrize("optimizer", [("SGD", {"lr": 0.1, "momentum": 0.9}), ("Adagrad", {"lr": 1e-2})])
def test_other_optimizers_and_plans_of_three_and_two(
    pool: GlooPool, new_generation: Iterator[int], optimizer: tuple[str, dict[str, float]]
) -> None:
    task = ChainTask(optimizer_name=optimizer[0], settings=optimizer[1])
    check(pool, new_generation, task, [Mesh(pp=3), Mesh(tp=2), Mesh(pp=2)])


def test_an_optimizer_that_looks_at_whole_tensors_runs_where_they_are_whole(
    pool: GlooPool, new_generation: Iterator[int]
) -> None:
    task = ChainTask(optimizer_name="Adafactor", settings={"lr": 1e-2})
    check(pool, new_generation, task, [Mesh(pp=2, dp_replicate=2), Mesh(dp_replicate=3)])


def test_an_untied_head_on_a_stage_of_its_own_changes_nothing(
    pool: GlooPool, new_generation: Iterator[int]
) -> None:
    check(pool, new_generation, ChainTask(tied=False), [Mesh(pp=3), Mesh(pp=2, tp=2)])


@pytest.mark.parametrize("kind", [pytest.param("selective", marks=pytest.mark.matrix), "full"])
def test_recomputed_blocks_draw_the_same_masks(
    pool: GlooPool, new_generation: Iterator[int], kind: Recompute
) -> None:
    check(pool, new_generation, ChainTask(), [Mesh(pp=2, dp_shard=2), Mesh(pp=2, tp=2), Mesh()], kind)


@pytest.mark.matrix
def test_uneven_shares_and_an_idle_index_of_a_pipeline_change_nothing(
    pool: GlooPool, new_generation: Iterator[int]
) -> None:
    task, run = ChainTask(), spec()
    gang = Gang(pool, new_generation, task, run)
    expected = None
    for mesh in (Mesh(pp=2, dp_replicate=2), Mesh(pp=2, dp_shard=2), Mesh(dp_shard=2, tp=2)):
        for shares in (((0,), (1, 2, 3, 4)), ((), (0, 1, 2, 3, 4))):
            gang.form(gang.plan_on(mesh, shares=shares, stages=SPLITS[mesh.pp]))
            expected = expected or reference(task, run, gang.whole())
            reports = gang.run()
            np.testing.assert_allclose([r.loss for r in reports], expected.losses, rtol=1e-9)
            assert_state_near(gang.whole(), expected.state)


def test_fused_projections_are_cut_part_by_part(pool: GlooPool, new_generation: Iterator[int]) -> None:
    meshes = [Mesh(tp=2), Mesh(dp_shard=2, tp=2), Mesh(pp=2, tp=2)]
    check(pool, new_generation, FusedTask(), meshes, splits={1: (), 2: ((0, 1), (1, 2))})


def test_metrics_are_the_same_under_plans_of_all_axes(pool: GlooPool, new_generation: Iterator[int]) -> None:
    gang = Gang(pool, new_generation, ChainTask(evaluate_every=2), spec(max_steps=3))
    found = []
    for mesh in (Mesh(), Mesh(pp=2, tp=2), Mesh(pp=2, dp_shard=2), Mesh(pp=3)):
        gang.form(gang.plan_on(mesh, stages=SPLITS[mesh.pp]))
        found.append([value for r in gang.run() for _, value in r.metrics])
    assert len(found[0]) == 2
    for metrics in found[1:]:
        np.testing.assert_allclose(metrics, found[0], rtol=1e-9)


def test_a_run_moves_between_plans_of_all_axes_without_a_change_of_its_losses(
    pool: GlooPool, new_generation: Iterator[int]
) -> None:
    task = ChainTask()
    gang = Gang(pool, new_generation, task, spec(max_steps=12))
    gang.form(gang.plan(1, 1))
    expected, state = [r.loss for r in gang.run()], gang.whole()
    moves = [
        (Mesh(pp=2, tp=2), [0, 1, 2, 3]),
        (Mesh(dp_shard=3), [1, 2, 3]),
        (Mesh(pp=3), [3, 0, 1]),
        (Mesh(dp_replicate=2, tp=2), [0, 1, 2, 3]),
        (Mesh(pp=2, dp_shard=2), [2, 3, 1, 0]),
        (Mesh(), [2]),
    ]
    losses: list[float] = []
    for number, (mesh, processes) in enumerate(moves, start=1):
        origin = gang.held() if number > 1 else None
        before = gang.whole() if number > 1 else {}
        gang.form(gang.plan_on(mesh, stages=SPLITS[mesh.pp]), processes, origin)
        after = gang.whole()
        assert all(np.array_equal(before[name], after[name]) for name in before)
        reports = gang.run() if number == len(moves) else gang.pause_at(2 * number)
        assert [r.step for r in reports] == [2 * number - 1, 2 * number]
        losses += [r.loss for r in reports]
    np.testing.assert_allclose(losses, expected, rtol=1e-9)
    final = gang.whole()
    assert final.keys() == state.keys()
    assert_state_near(final, state)


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


@pytest.mark.matrix
def test_ten_plans_one_after_the_other_give_the_same_bits_twice(new_generation: Iterator[int]) -> None:
    run = spec(max_steps=2 * len(TEN_PLANS), batch=Batch(global_size=13, micro_size=1, seed=11))
    with GlooPool(7) as pool:
        gang = Gang(pool, new_generation, ChainTask(), run)
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
