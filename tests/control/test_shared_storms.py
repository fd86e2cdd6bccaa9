"""Several runs on one cluster in bad weather: each comes to its end, and no node has more workers than fit.

Machines come and go for all of them; whatever else goes wrong befalls one. A failure prints its seed.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from elastic_train.control.fault_schedule import FaultSchedule
from elastic_train.control.policy import Policy
from elastic_train.testing.shared_simulation import SharedSimulation
from elastic_train.testing.simulated_faults import bad_weather
from elastic_train.testing.simulator import simulated_policy

pytestmark = pytest.mark.ring0

NODES = ("a", "b", "c", "d")
CALM = FaultSchedule(faults=(), seed=0)


def patient(number: int) -> Policy:
    """Of a run that waits for room for as long as the others may need it."""
    policy = simulated_policy(replicas=1 + number % 2, peers=number % 3 == 0)
    return replace(policy, salt=number, timing=replace(policy.timing, wait_for_capacity_s=3000.0))


def weather(seed: int) -> float:
    """When the last one had ended, in seconds."""
    runs = [
        (
            patient(seed + number),
            bad_weather(7 * seed + number, steps=15, nodes=NODES, ranks=4, faults=seed % 5),
        )
        for number in range(2 + seed % 4)
    ]
    simulation = SharedSimulation(runs, seed=seed, nodes=NODES, apart_s=9.0 * (seed % 3))
    for run, ended in zip(simulation.runs, simulation.run(), strict=True):
        if ended.outcome == "checkpoint":
            assert run.cluster.storage.sound(10**9) is None, f"seed {seed}: a sound checkpoint was left"
        else:
            assert ended.outcome == "finished", f"seed {seed}: {run.name}: {ended}"
    return simulation.clock.now


@pytest.mark.parametrize("ten", range(6))
def test_runs_that_share_nodes_all_come_to_their_end(ten: int) -> None:
    for seed in range(10 * ten, 10 * ten + 10):
        weather(seed)


def test_runs_that_hold_what_storage_has_not_and_lack_room_do_not_wait_for_each_other() -> None:
    """Five runs of two workers on three places, and three of them hold state. None waits for half an hour."""
    assert weather(919) < 1200.0


@pytest.mark.matrix
@pytest.mark.parametrize("hundred", range(10))
def test_a_thousand_clusters_with_several_runs(hundred: int) -> None:
    """`SEED=s` moves the seeds."""
    first = int(os.environ.get("SEED", "0")) + 100 * hundred
    print(f"several runs from seed {first}")
    for number in range(100):
        weather(first + number)


@pytest.mark.parametrize("seed", range(5))
def test_runs_without_faults_of_their_own_lose_nobody_by_another(seed: int) -> None:
    """One meets a storm that spares machines; the others train as if alone."""
    storm = [
        f
        for f in bad_weather(seed, steps=15, nodes=NODES, ranks=4, faults=6).faults
        if not hasattr(f, "node")
    ]
    runs = [(patient(1), replace(CALM, faults=tuple(storm))), (patient(1), CALM), (patient(2), CALM)]
    simulation = SharedSimulation(runs, seed=seed, nodes=(*NODES, *"efghijkl"))
    assert [ended.outcome for ended in simulation.run()] == ["finished"] * 3
    for run in simulation.runs[1:]:
        assert run.controller.state.facts.failures.ever == 0
