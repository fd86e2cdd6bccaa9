"""Every way to divide the data-parallel ranks computes what one process computes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from elastic_train.config import Batch, RunSpec
from elastic_train.data.order import SampleOrder
from elastic_train.testing.gang import Gang
from elastic_train.testing.gloo_pool import GlooPool
from elastic_train.testing.tiny import TinyTask
from elastic_train.train.collate import collate
from elastic_train.train.rng import Randomness

pytestmark = pytest.mark.ring2

MESHES = [(1, 1), (2, 1), (1, 2), (3, 1), (1, 3), (4, 1), (2, 2), (1, 4)]
STEPS = 6

State = dict[tuple[str, str], np.ndarray]


def spec(global_size: int, **changes: object) -> RunSpec:
    return RunSpec(
        **{
            "name": "tiny",
            "storage_path": "/nowhere",
            "batch": Batch(global_size=global_size, micro_size=3, seed=11),
            "max_steps": STEPS,
            "min_workers": 1,
            "max_workers": 4,
            "precision": "fp64",
            "clip_norm": 2.0,
            **changes,
        }
    )


def reference(task: TinyTask, run: RunSpec, initial: State) -> tuple[list[float], list[float], State]:
    """A plain training loop in this process: losses, gradient norms, parameters and moments."""
    torch.set_default_dtype(torch.float64)
    try:
        model = task.model().train()
        data = task.dataset()
        optimizer = task.optimizer(model.named_parameters())
        schedule = task.schedule(optimizer)
    finally:
        torch.set_default_dtype(torch.float32)
    named = dict(model.named_parameters())
    model.positions.reset_parameters()
    with torch.no_grad():
        for fqn, parameter in named.items():
            parameter.copy_(torch.from_numpy(initial[fqn, "param"]))
    randomness = Randomness(model, seed=run.batch.seed)
    order = SampleOrder(len(data), run.batch)
    losses, norms = [], []
    for step in range(1, run.max_steps + 1):
        optimizer.zero_grad()
        total, count = 0.0, 0
        for micro in order.micro_batches(step):
            batch = collate([data[i] for i in micro.ids], torch.device("cpu"), torch.float64)
            with randomness.micro_batch(step, micro.index):
                output = model(batch["tokens"])
                loss, counted = task.loss(
                    output[: micro.real], {k: v[: micro.real] for k, v in batch.items()}
                )
            loss.backward()
            total, count = total + float(loss.detach()), count + int(counted)
        for parameter in named.values():
            if parameter.grad is not None:
                parameter.grad /= count
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), run.clip_norm)))
        optimizer.step()
        schedule.step()
        losses.append(total / count)
    state = {(fqn, "param"): p.detach().numpy() for fqn, p in named.items()}
    for fqn, parameter in named.items():
        for name, value in optimizer.state.get(parameter, {}).items():
            if name != "step":
                state[fqn, name] = value.numpy()
    return losses, norms, state


def assert_near(found: State, expected: State) -> None:
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-9, atol=1e-12, err_msg=str(name))


@pytest.mark.parametrize("global_size", [12, 13])
def test_every_plan_equals_the_single_process_reference(
    pool: GlooPool, new_generation: Iterator[int], global_size: int
) -> None:
    task, run = TinyTask(), spec(global_size)
    gang = Gang(pool, new_generation, task, run)
    expected = initial = None
    for mesh in MESHES:
        gang.form(gang.plan(*mesh))
        started = gang.whole()
        if expected is None or initial is None:
            initial, expected = started, reference(task, run, started)
        assert started.keys() == initial.keys()
        assert all(np.array_equal(started[name], initial[name]) for name in initial), mesh
        reports = gang.run()
        np.testing.assert_allclose([r.loss for r in reports], expected[0], rtol=1e-9, err_msg=str(mesh))
        np.testing.assert_allclose([r.grad_norm for r in reports], expected[1], rtol=1e-9, err_msg=str(mesh))
        assert_near(gang.whole(), expected[2])


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
    new_generation: Iterator[int],
    mesh: tuple[int, int],
    shares: tuple[tuple[int, ...], ...],
) -> None:
    task, run = TinyTask(), spec(13)
    gang = Gang(pool, new_generation, task, run)
    gang.form(gang.plan(*mesh, shares))
    expected = reference(task, run, gang.whole())
    reports = gang.run()
    np.testing.assert_allclose([r.loss for r in reports], expected[0], rtol=1e-9)
    assert_near(gang.whole(), expected[2])


@pytest.mark.parametrize("mesh", [(3, 1), (1, 3), (2, 2)])
def test_the_same_plan_twice_gives_the_same_bits(
    pool: GlooPool, new_generation: Iterator[int], mesh: tuple[int, int]
) -> None:
    gang = Gang(pool, new_generation, TinyTask(), spec(13, precision="fp32"))
    runs = []
    for _ in range(2):
        gang.form(gang.plan(*mesh))
        runs.append(([r.vote for r in gang.run()], gang.whole()))
    assert runs[0][0] == runs[1][0]
    assert all(np.array_equal(runs[0][1][name], runs[1][1][name]) for name in runs[0][1])


def test_every_sample_is_counted_once_under_every_plan(pool: GlooPool, new_generation: Iterator[int]) -> None:
    run = spec(13)
    gang = Gang(pool, new_generation, TinyTask(), run)
    digests = []
    for mesh in [(1, 1), (3, 1), (1, 4)]:
        gang.form(gang.plan(*mesh))
        digests.append([(r.ids_digest, r.tokens) for r in gang.run()])
    assert all(each == digests[0] for each in digests)


def test_float32_plans_agree_within_rounding(pool: GlooPool, new_generation: Iterator[int]) -> None:
    gang = Gang(
        pool, new_generation, TinyTask(settings={"lr": 3e-3}), spec(12, precision="fp32", max_steps=20)
    )
    losses = []
    for mesh in [(1, 1), (1, 3), (2, 2)]:
        gang.form(gang.plan(*mesh))
        losses.append([r.loss for r in gang.run()])
    for one, other in itertools.pairwise(losses):
        np.testing.assert_allclose(one, other, rtol=1e-5)


def test_bfloat16_plans_compute_in_bfloat16_on_float32_masters(
    pool: GlooPool, new_generation: Iterator[int]
) -> None:
    task = TinyTask(settings={"lr": 3e-3})
    gang = Gang(pool, new_generation, task, spec(12, precision="bf16"))
    losses = []
    for mesh in [(1, 1), (2, 1), (1, 2)]:
        gang.form(gang.plan(*mesh))
        losses.append([r.loss for r in gang.run()])
        assert all(value.dtype == np.float32 for value in gang.whole().values())
    np.testing.assert_allclose(losses[1:], [losses[0]] * 2, rtol=1e-2)
    gang = Gang(pool, new_generation, task, spec(12, precision="fp32"))
    gang.form(gang.plan(1, 1))
    exact = [r.loss for r in gang.run()]
    assert losses[0] != exact
    np.testing.assert_allclose(losses[0], exact, rtol=5e-2)
