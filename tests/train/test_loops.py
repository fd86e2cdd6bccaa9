"""Loops of users: equal to the tasks that they spell out, through kills and moves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from elastic_train.config import Batch, RunSpec
from elastic_train.testing.gang import From, Gang
from elastic_train.testing.gloo_pool import GlooPool
from elastic_train.train.declaration.loop_task import LoopTask
from elastic_train.train.step.training_loop import StepReport
from tests.tasks import loops

pytestmark = pytest.mark.ring2


def spec(**changes: Any) -> RunSpec:
    return RunSpec(
        **{
            "name": "loop",
            "storage_path": "/nowhere",
            "batch": Batch(global_size=12, micro_size=3, seed=5),
            "max_steps": 9,
            "min_workers": 1,
            "max_workers": 4,
            "precision": "fp64",
            "clip_norm": 2.0,
            **changes,
        }
    )


def losses(reports: list[StepReport]) -> list[float]:
    """One a step: a report of metrics says the step again."""
    return list({r.step: r.loss for r in reports}.values())


def metrics(reports: list[StepReport]) -> list[dict[str, float]]:
    """By step: a later report of a step adds to it."""
    found: dict[int, dict[str, float]] = {}
    for report in reports:
        found.setdefault(report.step, {}).update(report.metrics)
    return list(found.values())


def broken_off(gang: Gang, process: int, phase: str, step: int) -> list[StepReport]:
    """Kill a process at a phase, break the group, and replace the process; what the others reported."""
    running = gang.begin_until(process, phase, step)
    gang.pool.kill(process)
    others = [p for p in gang.processes if p != process]
    gang.abort(others)
    outcomes = running.results(ranks=others)
    assert all(end is None and error.startswith("GroupBroken") for end, error, _ in outcomes), outcomes
    return outcomes[0][2]


def test_a_loop_has_the_losses_of_the_task_that_it_spells_out_through_a_kill_and_a_move(
    pool: GlooPool,
) -> None:
    gang = Gang(pool, loops.AsTask(batch_norm=True), spec())
    gang.form(gang.plan(1, 1))
    expected, state = losses(gang.run()), gang.whole()

    gang = Gang(pool, LoopTask(loops.plain), spec())
    gang.form(gang.plan(2, 1), [0, 1])
    found = losses(broken_off(gang, 1, "backward", 3))
    gang.form(gang.plan(1, 2), [0, 2], From(generation=gang.generation, step=2, holders=(0,)))
    found += losses(gang.pause_at(6))
    gang.form(gang.plan(1, 3), [2, 0, 3], gang.held())
    found += losses(gang.run())
    np.testing.assert_allclose(found, expected, rtol=1e-9)
    final = gang.whole()
    assert final.keys() == state.keys()
    for name in state:
        np.testing.assert_allclose(final[name], state[name], rtol=1e-9, atol=1e-12, err_msg=str(name))


@pytest.mark.matrix
def test_registered_state_evaluations_and_schedules_go_on_where_they_were(pool: GlooPool) -> None:
    gang = Gang(pool, LoopTask(loops.averaged), spec(max_steps=8))
    gang.form(gang.plan(1, 1))
    reports = gang.run()
    rates, expected, state = [r.rates for r in reports], metrics(reports), gang.whole()
    assert expected[2]["updates"] == 3.0
    assert len({rate[0] for rate in rates}) == 8

    gang.form(gang.plan(1, 2), [0, 1])
    reports = gang.pause_at(3)
    gang.form(gang.plan(2, 1), [1, 2], gang.held())
    reports += broken_off(gang, 2, "evaluation", 6)
    gang.form(gang.plan(1, 2), [3, 1], From(generation=gang.generation, step=6, holders=(1,)))
    reports += gang.run()
    found = metrics(reports)
    assert [each.keys() for each in found] == [each.keys() for each in expected]
    np.testing.assert_allclose(
        [each[name] for each in found for name in sorted(each)],
        [each[name] for each in expected for name in sorted(each)],
        rtol=1e-9,
    )
    final = gang.whole()
    assert ("average.weights.embed.weight", "buffer") in final
    for name in state:
        np.testing.assert_allclose(final[name], state[name], rtol=1e-9, atol=1e-12, err_msg=str(name))


def by_hand(steps: int) -> list[tuple[float, float]]:
    """Losses of critic and generator that `adversarial` reports, in plain torch on whole batches."""
    from elastic_train.data.order import SampleOrder
    from elastic_train.train.model.build import default_dtype

    seed = 5
    samples = [loops.Noise()[i] for i in range(60)]
    with default_dtype(torch.float64):
        torch.manual_seed(seed)
        generator, critic = loops.two_layers(3, 2), loops.two_layers(2, 1)
        own = torch.optim.Adam(generator.parameters(), lr=1e-2)
        other = torch.optim.Adam(critic.parameters(), lr=2e-2)
        order, found = SampleOrder(len(samples), Batch(global_size=12, micro_size=3, seed=seed)), []
        for step in range(1, steps + 1):
            ids = [i for micro in order.micro_batches(step) for i in micro.ids]
            real = torch.stack([samples[i]["real"] for i in ids]).double()
            noise = torch.stack([samples[i]["noise"] for i in ids]).double()
            other.zero_grad()
            judged = F.softplus(-critic(real)).mean() + F.softplus(critic(generator(noise).detach())).mean()
            judged.backward()
            other.step()
            own.zero_grad()
            fooled = F.softplus(-critic(generator(noise))).mean()
            fooled.backward()
            own.step()
            found.append((judged.item(), fooled.item()))
    return found


def test_two_optimizers_in_one_step_are_those_of_plain_torch_and_a_half_step_is_taken_back(
    pool: GlooPool,
) -> None:
    gang = Gang(pool, LoopTask(loops.adversarial), spec(clip_norm=None))
    gang.form(gang.plan(1, 2), [0, 1])
    reports = gang.pause_at(3)
    gang.form(gang.plan(2, 1), [0, 1], gang.held())
    reports += broken_off(gang, 1, "reduce", 6)  # after the second reduction would be "vote"
    gang.form(gang.plan(1, 3), [0, 2, 3], From(generation=gang.generation, step=5, holders=(0,)))
    reports += gang.run()
    found = list({r.step: (dict(r.metrics)["critic"], r.loss) for r in reports if r.metrics}.values())
    np.testing.assert_allclose(found, by_hand(9), rtol=1e-9)


def test_what_was_updated_inside_a_step_is_as_before_where_the_step_is_broken_off(pool: GlooPool) -> None:
    gang = Gang(pool, LoopTask(loops.adversarial), spec(clip_norm=None))
    gang.form(gang.plan(2, 1), [0, 1])
    gang.pause_at(2)
    before = gang.whole()
    gang.form(gang.plan(2, 1), [0, 1], gang.held())
    broken_off(gang, 1, "vote", 3)  # the critic is updated by then
    gang.processes = (0,)
    after = gang.whole()
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("loop", "said"),
    [
        (loops.raises, "ValueError: the loss of step 3 is no good"),
        (loops.late, "ctx.register('late')"),
        (loops.evaluates_after, "Evaluate before `with ctx.step()`"),
        (loops.swallows, "GroupBroken"),
    ],
)
def test_what_a_loop_does_wrong_is_said_and_an_abort_is_not_swallowed(
    pool: GlooPool, loop: Any, said: str
) -> None:
    gang = Gang(pool, LoopTask(loop), spec())
    gang.form(gang.plan(1, 1), [0])
    running = gang.begin()
    if loop is loops.swallows:
        gang.abort()
    end, error, _ = running.results()[0]
    assert end is None
    assert said in error
    if loop is loops.raises:
        assert error.startswith("UserCodeError")
        assert "loops.py" in error


def test_a_loop_that_returns_ends_the_run_with_a_checkpoint(pool: GlooPool) -> None:
    gang = Gang(pool, LoopTask(loops.stops), spec())
    gang.form(gang.plan(1, 2), [0, 1])
    reports = gang.run()
    assert reports[-1].step == 4
    assert reports[-1].last
    assert not any(r.last for r in reports[:-1])
    saved = pool.run(steps_saved, ranks=[0, 1])
    assert saved == [[4], [4]]


def steps_saved(state: dict) -> list[int]:
    return [step for step, _, _ in state["saved"]]
