"""Storms of faults over the same transition that the real controller runs. A failure prints its seed."""

from __future__ import annotations

import os
from itertools import pairwise

import pytest

from elastic_train.config import Batch, Checkpoints, RunSpec
from elastic_train.control.events import StepCommitted, Tick
from elastic_train.control.fault_schedule import (
    AddNode,
    BreakRank,
    DrainNode,
    FaultSchedule,
    KillController,
    KillNode,
    KillRank,
    Moment,
    StopRank,
    storm,
)
from elastic_train.control.policy import Policy
from elastic_train.control.states import Ended
from elastic_train.planner.hardware import Hardware, Link
from elastic_train.planner.search import Search, planner_for
from elastic_train.testing.simulator import Simulation, simulated_policy
from tests.planner.models import transformer

pytestmark = pytest.mark.ring0

NODES = ("a", "b", "c", "d")


def weather(seed: int, *, stages: bool = False, context: int = 1) -> Ended:
    """One run through a random storm, ended as it has to."""
    simulation = Simulation(
        policy=simulated_policy(replicas=(1, 2, None)[seed % 3], stages=stages, context=context),
        schedule=storm(seed, steps=15, nodes=NODES, ranks=4, faults=seed % 6),
        refold=seed % 10 == 0,
    )
    ended = simulation.run()
    if ended.outcome == "checkpoint":
        assert simulation.cluster.storage.sound(10**9) is None, f"seed {seed}: a sound checkpoint was left"
    else:
        assert ended.outcome == "finished", f"seed {seed}: {ended}"
    return ended


@pytest.mark.parametrize("hundred", range(10))
def test_a_thousand_storms_keep_every_invariant(hundred):
    for seed in range(100 * hundred, 100 * hundred + 100):
        weather(seed)


def test_storms_over_divided_sequences_keep_every_invariant():
    for seed in range(30):
        weather(seed, context=2)


@pytest.mark.parametrize("copies", [1, None])
def test_a_loss_within_a_divided_sequence_costs_no_step_where_nothing_is_sharded(copies):
    run = Simulation(
        policy=simulated_policy(replicas=copies, context=4 if copies else 2),
        schedule=FaultSchedule(faults=(KillRank(when=Moment(step=7, phase="backward"), rank=1),), seed=0),
        records=[],
    )
    assert run.run().outcome == "finished"
    assert run.records is not None
    formed = [r.formed for r in run.records if r.formed is not None]
    assert formed[0].mesh == ("cp 4" if copies else "dp_replicate 2 x cp 2")
    assert [f.source for f in formed[1:]] == ["live"] * len(formed[1:])
    assert formed[1].step in (6, 7)


@pytest.mark.parametrize("hundred", range(1))
def test_storms_over_pipelines_that_log_keep_every_invariant(hundred):
    for seed in range(100 * hundred, 100 * hundred + 100):
        weather(seed, stages=True)


@pytest.mark.matrix
@pytest.mark.parametrize("thousand", range(10))
def test_ten_thousand_storms_over_pipelines_that_log_keep_every_invariant(thousand):
    first = int(os.environ.get("SEED", "0")) + 1000 * thousand
    print(f"storms from seed {first}")
    for number in range(1000):
        weather(first + number, stages=True)


@pytest.mark.parametrize("phase", ["forward", "backward", "reduce", "vote", "optimizer", "save"])
@pytest.mark.parametrize("seed", range(5))
def test_a_lost_stage_of_a_pipeline_that_logs_costs_no_step(phase, seed):
    simulation = play(
        KillRank(when=Moment(step=7, phase=phase), rank=1), policy=simulated_policy(stages=True), seed=seed
    )
    assert outcome(simulation) == "finished"
    formed = [r for r in simulation.records if r.formed]
    assert [r.formed.source for r in formed][:2] == ["fresh", "replay"]
    assert all("no committed step is lost" in r.reason for r in formed)


@pytest.mark.parametrize("seed", range(10))
def test_a_second_stage_lost_while_the_first_is_replayed_is_replayed_too(seed):
    """Not its neighbour, whose log goes with it."""
    faults = (KillRank(when=Moment(step=7), rank=0), KillRank(when=Moment(step=7, phase="forming"), rank=2))
    simulation = play(*faults, policy=simulated_policy(stages=True), seed=seed)
    assert outcome(simulation) == "finished"
    formed = [r for r in simulation.records if r.formed]
    assert all("no committed step is lost" in r.reason for r in formed)
    assert {r.formed.source for r in formed[1:]} <= {"replay", "live"}


@pytest.mark.matrix
@pytest.mark.parametrize("thousand", range(10))
def test_ten_thousand_storms_keep_every_invariant(thousand):
    """`SEED=s` moves the seeds."""
    first = int(os.environ.get("SEED", "0")) + 1000 * thousand
    print(f"storms from seed {first}")
    for number in range(1000):
        weather(first + number)


FILLING = Moment(step=5, phase="filling")


def play(*faults, policy: Policy | None = None, seed: int = 0, **values) -> Simulation:
    simulation = Simulation(
        policy=policy or simulated_policy(),
        schedule=FaultSchedule(faults=faults, seed=seed),
        records=[],
        **values,
    )
    simulation.run()
    return simulation


def outcome(simulation: Simulation) -> str:
    assert isinstance(simulation.controller.state.phase, Ended)
    return simulation.controller.state.phase.outcome


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_steady_cluster_never_reconfigures(replicas):
    simulation = play(policy=simulated_policy(replicas=replicas, max_steps=200))
    facts = simulation.controller.state.facts
    assert outcome(simulation) == "finished"
    assert (facts.lineage.generation, facts.measured.reconfigurations, facts.failures.ever) == (
        1,
        0,
        0,
    )


def test_quiet_ticks_are_not_journalled():
    simulation = play(policy=simulated_policy(max_steps=200))
    assert not any(isinstance(event, Tick) for event in simulation.journal)


def test_the_same_seed_gives_the_same_history():
    faults = storm(7, steps=15, nodes=NODES, ranks=4, faults=5).faults
    assert play(*faults, seed=7).journal == play(*faults, seed=7).journal


@pytest.mark.parametrize("phase", ["forward", "backward", "reduce", "vote", "optimizer", "save"])
@pytest.mark.parametrize("seed", range(5))
def test_with_a_replica_left_no_step_is_lost_wherever_a_rank_dies(phase, seed):
    simulation = play(KillRank(when=Moment(step=6, phase=phase), rank=1), seed=seed)
    assert outcome(simulation) == "finished"
    assert [r.formed.source for r in simulation.records if r.formed] == ["fresh", "live", "live"][
        : simulation.controller.state.facts.measured.reconfigurations + 1
    ]
    assert all("no committed step is lost" in r.reason for r in simulation.records if r.formed)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "then",
    [
        *(KillRank(when=FILLING, rank=rank) for rank in range(4)),
        *(StopRank(when=FILLING, rank=rank) for rank in (0, 3)),
        *(KillNode(when=FILLING, node=node) for node in "abd"),
        BreakRank(when=FILLING, rank=1),
        KillController(when=FILLING),
        DrainNode(when=FILLING, node="a", notice_s=60.0),
    ],
    ids=str,
)
def test_whatever_happens_while_a_newcomer_is_filled_no_committed_step_is_lost(then, seed):
    """A worker is lost; who takes its place gets its state while the others compute the first step."""
    policy = simulated_policy(replicas=None, max_steps=30)
    simulation = play(KillRank(when=Moment(step=4), rank=2), then, policy=policy, seed=seed)
    assert outcome(simulation) == "finished"
    formed = [r for r in simulation.records if r.formed]
    assert all(r.formed.source in ("fresh", "live") for r in formed)
    assert all("no committed step is lost" in r.reason for r in formed)
    # A controller that comes back finds the group training.
    changes = simulation.controller.state.facts.measured.reconfigurations
    assert changes >= (2 if isinstance(then, KillController) else 3), "the second fault came"


def test_a_rank_that_stands_still_costs_one_reconfiguration():
    simulation = play(StopRank(when=Moment(step=6), rank=2))
    assert outcome(simulation) == "finished"
    assert simulation.controller.state.facts.failures.ever == 1


@pytest.mark.parametrize("phase", ["forward", "reduce", "vote", "optimizer"])
def test_a_collective_that_raises_costs_a_reconfiguration_and_no_worker(phase):
    simulation = play(BreakRank(when=Moment(step=6, phase=phase), rank=1))
    facts = simulation.controller.state.facts
    assert outcome(simulation) == "finished"
    assert facts.measured.reconfigurations == 1
    assert all(worker.died is None for worker in simulation.cluster.workers.values())
    assert all("no committed step is lost" in r.reason for r in simulation.records if r.formed)


def test_a_slow_rank_is_not_a_dead_rank():
    simulation = play(StopRank(when=Moment(step=6), rank=2, seconds=5.0))
    assert simulation.controller.state.facts.measured.reconfigurations == 0


def test_a_drained_node_leaves_without_a_failure():
    simulation = play(DrainNode(when=Moment(step=5), node="b", notice_s=60.0))
    facts = simulation.controller.state.facts
    assert (facts.failures.ever, facts.measured.reconfigurations) == (0, 1)


@pytest.mark.parametrize("seed", range(5))
def test_ten_nodes_leave_in_turn_while_others_come_and_no_switch_stalls_the_run(seed):
    names = [*NODES, *(f"e{number}" for number in range(10))]
    moments = [Moment(step=6 * (number + 1)) for number in range(10)]
    leaving = [DrainNode(when=at, node=node, notice_s=25.0) for at, node in zip(moments, names, strict=False)]
    coming = [AddNode(when=at, node=node) for at, node in zip(moments, names[4:], strict=True)]
    faults = [fault for pair in zip(leaving, coming, strict=True) for fault in pair]
    simulation = play(*faults, policy=simulated_policy(max_steps=70), seed=seed)
    assert outcome(simulation) == "finished"
    assert simulation.controller.state.facts.failures.ever == 0
    steps = [r.seconds for r in simulation.records if isinstance(r.event, StepCommitted)]
    assert len(steps) == 70, "no step was lost"
    assert max(after - before for before, after in pairwise(steps)) < 20.0


def test_a_lost_node_is_replaced_by_one_that_comes_later():
    simulation = play(
        KillNode(when=Moment(step=4), node="c"),
        AddNode(when=Moment(step=8), node="e"),
        policy=simulated_policy(max_steps=40),
    )
    assert simulation.controller.state.facts.lineage.plans[-1][1].nodes == ("a", "b", "d", "e")


@pytest.mark.parametrize("seed", range(20))
def test_a_controller_that_comes_back_leaves_the_group_training(seed):
    simulation = play(KillController(when=Moment(step=5)), seed=seed)
    facts = simulation.controller.state.facts
    assert outcome(simulation) == "finished"
    assert (facts.term, facts.measured.reconfigurations) == (2, 0)


@pytest.mark.parametrize("seed", range(40))
def test_a_stop_at_any_moment_ends_the_run_with_its_last_step_saved(seed):
    simulation = play(seed=seed, stop_at=seed * 1.1)
    facts = simulation.controller.state.facts
    assert outcome(simulation) in ("stopped", "finished")
    assert facts.lineage.step == (facts.saves.stored.step if facts.saves.stored else 0)


def test_a_rank_that_dies_at_the_same_step_every_time_spends_the_budget():
    faults = tuple(KillRank(when=Moment(step=6), rank=0) for _ in range(10))
    simulation = play(*faults[:1], policy=simulated_policy(max_failures=0))
    assert outcome(simulation) == "infrastructure"


def every_axis() -> Search:
    return Search(
        micro_batches=8,
        shape=transformer(sequence=16, block_s=0.1),
        hardware=Hardware(between=Link(latency_s=1e-3, bytes_per_s=1e6)),
        virtual=(1,),
    )


@pytest.mark.parametrize("layers", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_storms_under_the_real_planner_keep_every_invariant(seed, layers):
    """With the model's layers it chooses among plans of all axes; tp needs two workers on a node."""
    spec = RunSpec(
        name="storm",
        storage_path="/runs",
        batch=Batch(global_size=16, micro_size=2),
        max_steps=15,
        min_workers=2,
        max_workers=4,
        checkpoints=Checkpoints(every=4, peers=None),
        max_failures=50,
        timing=simulated_policy().timing,
    )
    simulation = play(
        *storm(seed, steps=15, nodes=NODES, ranks=4, faults=4).faults,
        policy=Policy.of(spec, every_axis() if layers else planner_for(spec)),
        seed=seed,
    )
    assert outcome(simulation) in ("finished", "checkpoint")
