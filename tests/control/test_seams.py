"""Weather at the seams: commits that nobody answers, storage that hangs, long evaluations, slow code of the
job, an observer that sees nobody, ranks that hang. A failure prints its seed."""

from __future__ import annotations

import os

import pytest

from elastic_train.control.fault_schedule import FailStorage, KillNode, KillRank, Moment
from elastic_train.control.states import Ended
from elastic_train.testing.simulated_faults import (
    AnyFault,
    BlindObserver,
    Evaluate,
    HangRank,
    HangStorage,
    LoseCommits,
    SlowCode,
    Weather,
    bad_weather,
)
from elastic_train.testing.simulator import Simulation, simulated_policy

pytestmark = pytest.mark.ring0

NODES = ("a", "b", "c", "d")


def weather(seed: int, *, stages: bool = False) -> None:
    """One run through bad weather, ended as it has to."""
    simulation = Simulation(
        policy=simulated_policy(replicas=(1, 2, None)[seed % 3], peers=seed % 3 == 0, stages=stages),
        schedule=bad_weather(seed, steps=15, nodes=NODES, ranks=4, faults=seed % 5),
        refold=seed % 10 == 0,
    )
    ended = simulation.run()
    if ended.outcome == "checkpoint":
        assert simulation.cluster.storage.sound(10**9) is None, f"seed {seed}: a sound checkpoint was left"
    else:
        assert ended.outcome == "finished", f"seed {seed}: {ended}"


def played(*faults: AnyFault, seed: int = 0, **values) -> Simulation:
    simulation = Simulation(
        policy=simulated_policy(**values), schedule=Weather(faults=faults, seed=seed), records=[]
    )
    simulation.run()
    return simulation


def outcome(simulation: Simulation) -> str:
    assert isinstance(simulation.controller.state.phase, Ended)
    return simulation.controller.state.phase.outcome


@pytest.mark.parametrize("hundred", range(3))
def test_bad_weather_at_the_seams_keeps_every_invariant(hundred):
    for seed in range(100 * hundred, 100 * hundred + 100):
        weather(seed, stages=hundred == 2)


@pytest.mark.matrix
@pytest.mark.parametrize("thousand", range(10))
def test_ten_thousand_runs_in_bad_weather_keep_every_invariant(thousand):
    """`SEED=s` moves the seeds."""
    first = int(os.environ.get("SEED", "0")) + 1000 * thousand
    print(f"bad weather from seed {first}")
    for number in range(1000):
        weather(first + number, stages=number % 3 == 0)


@pytest.mark.parametrize("ten", range(5))
def test_what_no_machine_did_is_charged_to_no_machine(ten):
    """Storage that fails, hangs or loses commits, evaluations, slow code and an observer that sees nobody."""
    for seed in range(10 * ten, 10 * ten + 10):
        made = bad_weather(seed, steps=15, nodes=NODES, ranks=4, faults=6).faults
        calm = (HangStorage, LoseCommits, Evaluate, SlowCode, BlindObserver, FailStorage)
        simulation = played(*(f for f in made if isinstance(f, calm)), seed=seed)
        facts = simulation.controller.state.facts
        assert outcome(simulation) == "finished", f"seed {seed}"
        assert (facts.failures.ever, facts.lineage.generation) == (0, 1), f"seed {seed}"


@pytest.mark.parametrize("seed", range(10))
def test_nodes_that_arrive_in_a_long_evaluation_are_taken_after_it(seed):
    """Ten times as long as a group may stand still."""
    from elastic_train.control.fault_schedule import AddNode

    evaluation = Evaluate(when=Moment(step=3, phase="save"), seconds=600.0, mark_s=20.0)
    coming = [AddNode(when=Moment(step=3, phase="save"), node=f"e{n}") for n in range(2)]
    gone = [KillNode(when=Moment(step=1), node="c"), KillNode(when=Moment(step=1), node="d")]
    simulation = played(*gone, *coming, evaluation, seed=seed, max_steps=40)
    facts = simulation.controller.state.facts
    assert outcome(simulation) == "finished"
    assert len(facts.lineage.plans[-1][1].workers) == 4
    assert facts.failures.ever == 1


def test_a_group_that_forms_waits_for_the_jobs_own_code():
    simulation = played(
        SlowCode(when=Moment(step=5), seconds=300.0), KillRank(when=Moment(step=5, phase="backward"), rank=0)
    )
    facts = simulation.controller.state.facts
    assert outcome(simulation) == "finished"
    assert (facts.failures.ever, facts.measured.reconfigurations <= 2) == (1, True)


@pytest.mark.parametrize("seconds", [10.0, 60.0, 110.0])
@pytest.mark.parametrize("kind", [FailStorage, HangStorage])
def test_a_restore_and_a_last_checkpoint_outlast_storage_that_is_away(kind, seconds):
    """Everybody dies while it is away, and once more at the end."""
    kills = [KillRank(when=Moment(step=6), rank=rank) for rank in range(4)]
    simulation = played(
        *kills,
        kind(when=Moment(step=6), seconds=seconds),
        kind(when=Moment(step=15, phase="save"), seconds=seconds),
        replicas=1,
    )
    assert outcome(simulation) == "finished"
    assert simulation.controller.state.facts.failures.ever == 1


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("count", [1, 3])
def test_a_last_commit_that_nobody_answers_is_made_in_the_end(seed, count):
    simulation = played(LoseCommits(when=Moment(step=15), count=count), seed=seed)
    assert outcome(simulation) == "finished"


def test_a_rank_that_hangs_while_its_heartbeats_go_on_costs_one_reconfiguration():
    simulation = played(HangRank(when=Moment(step=6), rank=2))
    facts = simulation.controller.state.facts
    assert outcome(simulation) == "finished"
    assert facts.failures.ever == 1


@pytest.mark.parametrize("seed", range(10))
def test_peer_memory_brings_back_what_no_survivor_holds(seed):
    simulation = played(KillRank(when=Moment(step=7), rank=1), seed=seed, replicas=1, peers=True, every=100)
    assert outcome(simulation) == "finished"
    formed = [r.formed for r in simulation.records or () if r.formed]
    assert [f.source for f in formed][:2] == ["fresh", "mixed"]
    assert all("no committed step is lost" in r.reason for r in simulation.records or () if r.formed)


def test_the_same_seed_gives_the_same_history():
    faults = bad_weather(7, steps=15, nodes=NODES, ranks=4, faults=5).faults
    assert played(*faults, seed=7).journal == played(*faults, seed=7).journal
