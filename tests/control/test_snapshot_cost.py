"""What a snapshot takes from training is found from the steps beside it."""

from __future__ import annotations

import random

import pytest

from elastic_train.control.schedule import PEER_SHARE, peer_interval_s
from elastic_train.control.snapshot_cost import ENOUGH, RENEW_STEPS, SnapshotCost

pytestmark = pytest.mark.ring0
STEP_S, COPY_S = 0.05, 0.002


def trained(
    steps: int, *, beside: int, extra_s: float, noise: float = 0.0, step_s: float = STEP_S
) -> tuple[float, int, float]:
    """Train with snapshots as often as they are due: seconds of all steps, snapshots, and the cost believed.

    Each snapshot is under way for `beside` steps, which are longer by `extra_s` together.
    """
    draw = random.Random(0)
    cost, left, since, total, snapshots = SnapshotCost(), 0, 1e9, 0.0, 0
    for _ in range(steps):
        if not left and not cost.wants_quiet and since >= peer_interval_s(cost.seconds(COPY_S)):
            cost, left, since, snapshots = cost.begun(), beside, 0.0, snapshots + 1
        seconds = step_s * (1 + noise * draw.uniform(-1, 1)) + (extra_s / beside if left else 0.0)
        cost = cost.after(seconds, under_way=left > 0)
        left, since, total = max(0, left - 1), since + seconds, total + seconds
    return total, snapshots, cost.seconds(COPY_S)


@pytest.mark.parametrize("beside", [1, 3])
@pytest.mark.parametrize("extra_s", [0.008, 0.02, 0.3])
def test_the_share_is_that_of_the_steps_and_not_of_the_copy(beside: int, extra_s: float) -> None:
    total, snapshots, believed = trained(4000, beside=beside, extra_s=extra_s)
    assert believed == pytest.approx(extra_s, rel=1e-6)
    learnt = snapshots - ENOUGH - 1  # those before a cost was known
    assert 0.6 * PEER_SHARE <= learnt * extra_s / total <= PEER_SHARE


def test_what_costs_nothing_is_done_at_every_step() -> None:
    _, snapshots, believed = trained(2000, beside=1, extra_s=0.0, step_s=1.0)
    assert believed == COPY_S
    assert snapshots >= 0.98 * 2000


def test_noise_alone_is_no_cost() -> None:
    _, _, believed = trained(4000, beside=1, extra_s=0.0, noise=0.02)
    assert believed <= 0.02 * STEP_S + COPY_S


def test_the_first_snapshot_waits_for_nothing_and_the_comparison_is_renewed() -> None:
    cost = SnapshotCost()
    assert not cost.wants_quiet
    cost = cost.begun().after(STEP_S, under_way=True)
    for _ in range(ENOUGH):
        assert cost.wants_quiet
        cost = cost.after(STEP_S, under_way=False)
    for _ in range(ENOUGH):
        cost = cost.begun().after(2 * STEP_S, under_way=True).after(STEP_S, under_way=False)
    assert cost.seconds(COPY_S) == pytest.approx(STEP_S)
    for _ in range(RENEW_STEPS):
        assert not cost.wants_quiet
        cost = cost.begun().after(STEP_S, under_way=True)
    assert cost.wants_quiet
    assert not cost.after(STEP_S, under_way=False).wants_quiet
