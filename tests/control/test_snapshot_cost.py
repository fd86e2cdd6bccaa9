"""What a snapshot takes from training is found from the steps beside it."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from elastic_train.control.schedule import PEER_SHARE, peer_interval_s
from elastic_train.control.snapshot_cost import ENOUGH, RENEW_STEPS, SnapshotCost

pytestmark = pytest.mark.ring0
STEP_S, COPY_S = 0.05, 0.002


@dataclass(frozen=True)
class Trained:
    seconds: float
    snapshots: int
    believed: float  # what a snapshot costs
    beyond: float  # seconds that steps took longer


def trained(
    steps: int,
    *,
    beside: int,
    extra_s: float,
    noise: float = 0.0,
    step_s: float = STEP_S,
    stalls: float = 0.0,
    changes: float = 1.0,
    seed: int = 0,
) -> Trained:
    """Train with snapshots as often as they are due.

    Each is under way for `beside` steps, which are longer by `extra_s` together, and half way by `changes`
    times as much. A share of the steps stalls for about a step, whatever they do.
    """
    draw = random.Random(seed)
    cost, left, since, total, snapshots, beyond, each = SnapshotCost(), 0, 1e9, 0.0, 0, 0.0, extra_s
    for step in range(steps):
        each *= changes if step == steps // 2 else 1.0
        if not left and not cost.wants_quiet and since >= peer_interval_s(cost.seconds(COPY_S)):
            cost, left, since, snapshots = cost.begun(), beside, 0.0, snapshots + 1
        longer = each / beside if left else 0.0
        stalled = step_s * draw.expovariate(1.0) if draw.random() < stalls else 0.0
        seconds = step_s * (1 + noise * draw.uniform(-1, 1)) + stalled + longer
        cost = cost.after(seconds, under_way=left > 0)
        left, since, total, beyond = max(0, left - 1), since + seconds, total + seconds, beyond + longer
    return Trained(total, snapshots, cost.seconds(COPY_S), beyond)


@pytest.mark.parametrize("beside", [1, 3])
@pytest.mark.parametrize("extra_s", [0.008, 0.02, 0.3])
def test_the_share_is_that_of_the_steps_and_not_of_the_copy(beside: int, extra_s: float) -> None:
    found = trained(4000, beside=beside, extra_s=extra_s)
    assert found.believed == pytest.approx(extra_s, rel=1e-6)
    learnt = found.snapshots - ENOUGH - 1  # those before a cost was known
    assert 0.6 * PEER_SHARE <= learnt * extra_s / found.seconds <= PEER_SHARE


@pytest.mark.parametrize("changes", [0.25, 1.0, 4.0])
@pytest.mark.parametrize("stalls", [0.0, 0.1])
@pytest.mark.parametrize(("step_s", "beside", "extra_s"), [(0.02, 3, 0.05), (0.05, 1, 0.01), (1.0, 1, 0.2)])
def test_on_a_busy_machine_snapshots_slow_training_down_by_their_share_and_little_more(
    changes: float, stalls: float, step_s: float, beside: int, extra_s: float
) -> None:
    busy = {"noise": 0.3, "stalls": stalls, "changes": changes}
    runs = [
        trained(4000, beside=beside, extra_s=extra_s, step_s=step_s, seed=seed, **busy) for seed in (1, 2, 3)
    ]
    shares = [run.beyond / (run.seconds - run.beyond) for run in runs]
    assert min(shares) >= 0.25 * PEER_SHARE
    assert (
        sum(shares) / len(shares) <= 1.6 * PEER_SHARE
    )  # it takes some snapshots to learn that they cost more


def test_what_costs_nothing_is_done_at_every_step() -> None:
    found = trained(2000, beside=1, extra_s=0.0, step_s=1.0)
    assert found.believed == COPY_S
    assert found.snapshots >= 0.98 * 2000


def test_noise_alone_is_no_cost() -> None:
    found = trained(4000, beside=1, extra_s=0.0, noise=0.02)
    assert found.believed <= 0.02 * STEP_S + COPY_S


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
