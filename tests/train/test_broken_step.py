"""A step that breaks is not run again as a whole: what survivors computed of it is kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from elastic_train.config import Batch, RunSpec
from elastic_train.testing.gang import From, Gang
from elastic_train.testing.gang_member import waits_for_others
from elastic_train.testing.gloo_pool import GlooPool
from elastic_train.train.step.training_loop import StepReport
from tests.tasks.tiny import TinyTask, tiny_run

pytestmark = pytest.mark.ring2
MICRO_BATCHES = 12


def spec(**changes: Any) -> RunSpec:
    batch = Batch(global_size=2 * MICRO_BATCHES, micro_size=2, seed=5)
    return tiny_run(batch=batch, **{"clip_norm": 2.0, **changes})


class Measured(TinyTask):
    """With a metric of its own."""

    def metrics(self, output: Any, micro_batch: Any) -> dict[str, tuple[Any, float]]:
        return {"outputs": (output.square().sum().item(), output.numel())}


class Edited(TinyTask):
    """That changes its gradients where they are."""

    def gradients(self, gradients: Any) -> None:
        gradients.scale_(0.5)


PLAIN, MEASURED = TinyTask(samples=120), Measured(samples=120, batch_norm=True)


def count_forwards(state: dict) -> None:
    """From now on note which micro-batches run here."""
    ran = state["ran"] = []

    def fault(phase: str, step: int, micro_batch: int) -> None:
        if phase == "forward":
            ran.append((step, micro_batch))

    state["faults"] = fault


def ran(state: dict, step: int) -> list[int]:
    return [index for at, index in state["ran"] if at == step]


def assert_same(reports: Sequence[StepReport], expected: Sequence[StepReport]) -> None:
    assert [r.step for r in reports] == [r.step for r in expected]
    assert [r.ids_digest for r in reports] == [r.ids_digest for r in expected]
    for name in ("loss", "tokens", "grad_norm"):
        found, wanted = ([getattr(r, name) for r in each] for each in (reports, expected))
        np.testing.assert_allclose(found, wanted, rtol=1e-9, err_msg=name)
    for one, other in zip(reports, expected, strict=True):
        assert dict(one.metrics).keys() == dict(other.metrics).keys()
        for name, value in one.metrics:
            assert value == pytest.approx(dict(other.metrics)[name], rel=1e-9)


def break_in(gang: Gang, lost: int, phase: str, step: int, micro_batch: int = -1) -> list[StepReport]:
    """Train until one rank stands at a place of a step and the others wait for it; then it is lost."""
    others = [p for p in gang.processes if p != lost]
    gang.pool.run(count_forwards, ranks=others)
    running = gang.begin_until(lost, phase, step, micro_batch)
    gang.wait_for(others, waits_for_others, step)
    gang.abort()
    outcomes = dict(zip(gang.processes, running.results(), strict=True))
    assert all(error.startswith("GroupBroken") for _, error, _ in outcomes.values())
    gang.pool.run(count_forwards, ranks=others)
    return outcomes[others[0]][2]


@pytest.mark.parametrize("task", [PLAIN, MEASURED], ids=["plain", "measured"])
@pytest.mark.parametrize("lost", [0, 2])
def test_after_a_loss_only_what_the_lost_rank_had_is_run_again(
    pool: GlooPool, task: TinyTask, lost: int
) -> None:
    gang = Gang(pool, task, spec())
    gang.form(gang.plan(1, 1))
    expected, state = gang.run(), gang.whole()

    gang.form(gang.plan(3, 1))
    reports = break_in(gang, lost, "backward", 3, 6 if lost else 1)
    left = [p for p in (0, 1, 2) if p != lost]
    gang.form(gang.plan(2, 1), left, From(generation=gang.generation, step=2, holders=tuple(left)))
    reports += gang.run()

    assert_same(reports, expected)
    again = [pool.run(ran, 3, ranks=[p])[0] for p in left]
    assert sorted(i for own in again for i in own) == list(range(lost * 4, lost * 4 + 4))
    assert {len(own) for own in again} == {2}, "half of it each"
    final = gang.whole()
    for name in state:
        np.testing.assert_allclose(final[name], state[name], rtol=1e-9, atol=1e-12, err_msg=str(name))


def test_a_newcomer_that_is_filled_meanwhile_is_given_nothing_to_compute(pool: GlooPool) -> None:
    gang = Gang(pool, PLAIN, spec())
    gang.form(gang.plan(1, 1))
    expected = gang.run()

    gang.form(gang.plan(3, 1))
    reports = break_in(gang, 2, "backward", 3)
    pool.run(count_forwards, ranks=[2])
    origin = From(generation=gang.generation, step=2, holders=(0, 1))
    reports += gang.run_while_filling(gang.plan(3, 1), [0, 1, 2], origin, frozenset({2}))

    assert_same(reports, expected)
    again = [pool.run(ran, 3, ranks=[p])[0] for p in (0, 1, 2)]
    assert sorted(i for own in again for i in own) == [8, 9, 10, 11]
    assert list(map(len, again)) == [2, 2, 0]


def test_a_step_that_breaks_twice_keeps_what_both_groups_computed(pool: GlooPool) -> None:
    gang = Gang(pool, PLAIN, spec())
    gang.form(gang.plan(1, 1))
    expected = gang.run()

    gang.form(gang.plan(3, 1))
    reports = break_in(gang, 2, "forward", 3)
    gang.form(gang.plan(2, 1), [0, 1], From(generation=gang.generation, step=2, holders=(0, 1)))
    again = break_in(gang, 1, "backward", 3)
    assert again == [], "no step in between"
    gang.form(gang.plan(1, 1), [0], From(generation=gang.generation, step=2, holders=(0,)))
    reports += gang.run()

    assert_same(reports, expected)
    assert len(pool.run(ran, 3, ranks=[0])[0]) == 4 + 2, "what 1 had, of both groups"


@pytest.mark.parametrize(("phase", "place"), [("backward", 6), ("reduce", -1), ("vote", -1)])
def test_where_nobody_is_lost_each_goes_on_with_its_own_share_and_no_bit_changes(
    pool: GlooPool, phase: str, place: int
) -> None:
    gang = Gang(pool, PLAIN, spec(precision="fp32"))
    plan = gang.plan(3, 1)
    gang.form(plan)
    expected, state = gang.run(), gang.whole()

    gang.form(plan)
    running = gang.begin_until(1, phase, 3, place)
    if phase != "vote":
        gang.wait_for([0, 2], waits_for_others, 3)
    gang.abort()
    reports = running.results()[0][2]
    pool.run(count_forwards)
    gang.form(plan, None, From(generation=gang.generation, step=2, holders=(0, 1, 2)))
    reports += gang.run()

    assert [(r.loss, r.vote) for r in reports] == [(r.loss, r.vote) for r in expected]
    final = gang.whole()
    assert all(np.array_equal(final[name], state[name]) for name in state)
    again = [pool.run(ran, 3, ranks=[p])[0] for p in (0, 1, 2)]
    assert again == [[], [7] if phase == "backward" else [], []]


def test_under_plans_that_cut_the_model_the_step_runs_again(pool: GlooPool) -> None:
    gang = Gang(pool, PLAIN, spec())
    gang.form(gang.plan(1, 1))
    expected = gang.run()

    gang.form(gang.plan(3, 1))
    reports = break_in(gang, 2, "backward", 3)
    gang.form(gang.plan(1, 2), [0, 1], From(generation=gang.generation, step=2, holders=(0, 1)))
    reports += gang.run()

    assert_same(reports, expected)
    assert sum(len(pool.run(ran, 3, ranks=[p])[0]) for p in (0, 1)) == MICRO_BATCHES


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_a_task_does_to_its_gradients_is_not_kept_and_done_again(pool: GlooPool, ranks: int) -> None:
    gang = Gang(pool, Edited(samples=120), spec())
    plan, members = gang.plan(ranks, 1), tuple(range(ranks))
    gang.form(plan)
    expected = gang.run()

    gang.form(plan)
    running = gang.begin_until(0, "vote", 3)
    gang.abort()
    reports = running.results()[0][2]
    gang.form(plan, None, From(generation=gang.generation, step=2, holders=members))
    reports += gang.run()
    assert_same(reports, expected)
