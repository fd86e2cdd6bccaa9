"""Every way to divide the data-parallel ranks computes what one process computes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from elastic_train.config import RunSpec
from elastic_train.testing.gang import Gang
from elastic_train.testing.gloo_pool import GlooPool
from elastic_train.testing.reference import assert_state_near, reference
from tests.tasks.tiny import TinyTask, tiny_run

pytestmark = pytest.mark.ring2

MESHES = [(1, 1), (2, 1), (1, 2), (3, 1), (1, 3), (4, 1), (2, 2), (1, 4)]
STEPS = 6


def spec(global_size: int, **changes: object) -> RunSpec:
    return tiny_run(global_size, **{"max_steps": STEPS, "clip_norm": 2.0, **changes})


@pytest.mark.parametrize("global_size", [pytest.param(12, marks=pytest.mark.matrix), 13])
def test_every_plan_equals_the_single_process_reference(pool: GlooPool, global_size: int) -> None:
    task, run = TinyTask(), spec(global_size)
    gang = Gang(pool, task, run)
    expected = initial = None
    for mesh in MESHES:
        gang.form(gang.plan(*mesh))
        started = gang.whole()
        if expected is None or initial is None:
            initial, expected = started, reference(task, run, started)
        assert started.keys() == initial.keys()
        assert all(np.array_equal(started[name], initial[name]) for name in initial), mesh
        reports = gang.run()
        np.testing.assert_allclose([r.loss for r in reports], expected.losses, rtol=1e-9, err_msg=str(mesh))
        np.testing.assert_allclose(
            [r.grad_norm for r in reports], expected.norms, rtol=1e-9, err_msg=str(mesh)
        )
        assert_state_near(gang.whole(), expected.state)


@pytest.mark.parametrize(
    ("mesh", "shares"),
    [
        ((2, 1), ((0,), (1, 2, 3, 4))),
        ((1, 2), ((0, 3), (1, 2, 4))),
        ((1, 3), ((), (0, 1, 2, 3), (4,))),
        ((2, 2), ((4,), (), (0, 1), (2, 3))),
    ],
)
def test_uneven_shares_and_an_idle_rank_change_nothing(
    pool: GlooPool,
    mesh: tuple[int, int],
    shares: tuple[tuple[int, ...], ...],
) -> None:
    task, run = TinyTask(), spec(13)
    gang = Gang(pool, task, run)
    gang.form(gang.plan(*mesh, shares))
    expected = reference(task, run, gang.whole())
    reports = gang.run()
    np.testing.assert_allclose([r.loss for r in reports], expected.losses, rtol=1e-9)
    assert_state_near(gang.whole(), expected.state)


@pytest.mark.parametrize("mesh", [(3, 1), (1, 3), (2, 2)])
def test_the_same_plan_twice_gives_the_same_bits(pool: GlooPool, mesh: tuple[int, int]) -> None:
    gang = Gang(pool, TinyTask(), spec(13, precision="fp32"))
    runs = []
    for _ in range(2):
        gang.form(gang.plan(*mesh))
        runs.append(([r.vote for r in gang.run()], gang.whole()))
    assert runs[0][0] == runs[1][0]
    assert all(np.array_equal(runs[0][1][name], runs[1][1][name]) for name in runs[0][1])


def test_every_sample_is_counted_once_under_every_plan(pool: GlooPool) -> None:
    run = spec(13)
    gang = Gang(pool, TinyTask(), run)
    digests = []
    for mesh in [(1, 1), (3, 1), (1, 4)]:
        gang.form(gang.plan(*mesh))
        digests.append([(r.ids_digest, r.tokens) for r in gang.run()])
    assert all(each == digests[0] for each in digests)


@pytest.mark.matrix
def test_float32_plans_agree_within_rounding(pool: GlooPool) -> None:
    gang = Gang(pool, TinyTask(settings={"lr": 3e-3}), spec(12, precision="fp32", max_steps=20))
    losses = []
    for mesh in [(1, 1), (1, 3), (2, 2)]:
        gang.form(gang.plan(*mesh))
        losses.append([r.loss for r in gang.run()])
    for one, other in itertools.pairwise(losses):
        np.testing.assert_allclose(one, other, rtol=1e-5)


def test_bfloat16_plans_compute_in_bfloat16_on_float32_masters(pool: GlooPool) -> None:
    task = TinyTask(settings={"lr": 3e-3})
    gang = Gang(pool, task, spec(12, precision="bf16"))
    losses = []
    for mesh in [(1, 1), (2, 1), (1, 2)]:
        gang.form(gang.plan(*mesh))
        losses.append([r.loss for r in gang.run()])
        assert all(value.dtype == np.float32 for value in gang.whole().values())
    np.testing.assert_allclose(losses[1:], [losses[0]] * 2, rtol=1e-2)
    gang = Gang(pool, task, spec(12, precision="fp32"))
    gang.form(gang.plan(1, 1))
    exact = [r.loss for r in gang.run()]
    assert losses[0] != exact
    np.testing.assert_allclose(losses[0], exact, rtol=5e-2)
