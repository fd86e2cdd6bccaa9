"""The optimizer in backward on real groups: the same bits, and groups that break between two updates."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from elastic_train.config import RunSpec
from elastic_train.planner.plan import Plan
from elastic_train.recovery.choose_recovery import Choice, Evidence, choose, holders
from elastic_train.recovery.evidence import Live, LocalState
from elastic_train.testing.gang import From, Gang
from elastic_train.testing.gang_member import call
from elastic_train.testing.gloo_pool import GlooPool
from elastic_train.train.parallel import gradient_overlap
from tests.tasks.tiny import TinyTask, tiny_run

pytestmark = pytest.mark.ring2

BROKEN_AT = 3


def spec(**changes: Any) -> RunSpec:
    return tiny_run(**{"optimizer_in_backward": True, **changes})


def cut_buckets(state: dict, size: int) -> None:
    """Sums of single tensors, so that a small model has several; until the test is over."""
    state["undo"] = functools.partial(
        setattr, gradient_overlap, "BUCKET_BYTES", gradient_overlap.BUCKET_BYTES
    )
    gradient_overlap.BUCKET_BYTES = size


@pytest.mark.parametrize(
    "mesh",
    [
        (2, 2),
        pytest.param((2, 1), marks=pytest.mark.matrix),
        pytest.param((1, 3), marks=pytest.mark.matrix),
    ],
)
def test_parameters_updated_in_backward_have_the_bits_of_an_update_after_the_vote(
    pool: GlooPool, mesh: tuple[int, int]
) -> None:
    found = []
    for early in (False, True):
        gang = Gang(
            pool,
            TinyTask(batch_norm=True),
            spec(optimizer_in_backward=early, precision="fp32"),
        )
        gang.form(gang.plan(*mesh))
        found.append((gang.run(), gang.whole()))
    (reports, state), (early_reports, early_state) = found
    assert [r.loss for r in early_reports] == [r.loss for r in reports]
    assert [r.grad_norm for r in early_reports] == pytest.approx([r.grad_norm for r in reports])
    assert early_state.keys() == state.keys()
    assert all(np.array_equal(early_state[name], state[name]) for name in state)


def chosen(gang: Gang, plan: Plan, held: list[LocalState], at: int) -> tuple[Choice, From]:
    """What the survivors go on from."""
    given = Evidence(
        lineage=((gang.generation, 0),),
        plans={gang.generation: plan},
        local_states=tuple((f"w{h.rank}", (h,)) for h in held),
        step=at,
        seen=None,
        stored=None,
        ever_stored=False,
    )
    choice = choose(given)
    assert isinstance(choice, Choice)
    origin = choice.origin
    assert isinstance(origin, Live)
    serving = tuple(int(name[1:]) for name in holders(given, origin))
    return choice, From(
        generation=gang.generation, step=origin.step, holders=serving, vote=origin.vote, undo=origin.undo
    )


@pytest.mark.parametrize(
    ("mesh", "heartbeat", "count", "killed"),
    [
        ((2, 1), 0, 3, 1),
        pytest.param((2, 1), 0, 1, None, marks=pytest.mark.matrix),
        pytest.param((2, 2), 1, 4, 3, marks=pytest.mark.matrix),
        pytest.param((1, 2), 1, 5, None, marks=pytest.mark.matrix),
    ],
)
def test_a_group_that_breaks_between_two_updates_goes_on_from_what_is_left(
    pool: GlooPool,
    mesh: tuple[int, int],
    heartbeat: int,
    count: int,
    killed: int | None,
) -> None:
    """One rank stands still between two updates, wherever the others are then; another may be killed."""
    gang = Gang(pool, TinyTask(), spec())
    plan = gang.plan(*mesh)
    pool.run(cut_buckets, 64, ranks=range(plan.world_size))
    gang.form(plan)
    expected, state = [r.loss for r in gang.run()], gang.whole()

    gang.form(plan)
    running = gang.begin_until(heartbeat, "update", BROKEN_AT, count)
    survivors = [p for p in gang.processes if p != killed]
    if killed is not None:
        pool.kill(killed)
    gang.abort(survivors)
    outcomes = running.results(ranks=survivors)
    assert all(end is None and error.startswith("GroupBroken") for end, error, _ in outcomes)
    reports = outcomes[0][2]
    held = [h for found in pool.run(call, "held.local_states", ranks=survivors) for h in found]
    assert any(h.ahead for h in held), "nothing was updated: the test broke nothing off"
    choice, origin = chosen(gang, plan, held, reports[-1].step)

    gang.form(gang.plan(1, len(survivors)), survivors, origin)
    after = gang.run()
    assert after[0].step == choice.step + (0 if choice.step == BROKEN_AT else 1)
    losses = {r.step: r.loss for r in [*reports, *after]}
    assert [losses[step] for step in sorted(losses)] == pytest.approx(expected, rel=1e-7)
    final = gang.whole()
    for name, value in state.items():
        np.testing.assert_allclose(final[name], value, rtol=1e-6, atol=1e-7)
