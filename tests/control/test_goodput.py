"""A group changes where the planner finds that it pays, and says why it stays where it doesn't."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic_train.config import Parallelism
from elastic_train.control.commands import Form
from elastic_train.control.events import Node, NodesChanged
from elastic_train.control.planner_questions import held, to_change
from elastic_train.control.states import Pausing, Running
from elastic_train.planner.hardware import Hardware, Link
from elastic_train.planner.plan import Mesh
from elastic_train.planner.search import Search
from elastic_train.testing.simulator import simulated_policy
from tests.control.conftest import Play
from tests.planner.models import transformer

pytestmark = pytest.mark.ring0
MODEL = transformer(sequence=16)


def searching(**axes: int) -> Play:
    """A run whose planner knows the model's layers; a worker holds megabytes and receives one in a second."""
    planner = Search(
        micro_batches=12,
        shape=MODEL,
        hardware=Hardware(between=Link(latency_s=1e-4, bytes_per_s=1e6)),
        constraints=Parallelism(**axes),
        virtual=(1,),
        data_first=True,
    )
    policy = simulated_policy(max_steps=10_000)
    return Play(replace(policy, plan=planner, standby=1, min_workers=1))


def test_five_workers_on_two_two_and_one_find_two_pairs() -> None:
    """The oldest four are no two pairs: the one that is alone on its node came first."""
    play = searching(tp=2, pp=2)
    play.begin(0)
    sizes = (("a", 1), ("b", 2), ("c", 2))
    play(NodesChanged, nodes=tuple(Node(name=name, slots=slots) for name, slots in sizes))
    play.ready(*sorted((w.name for w in play.facts.membership.workers), reverse=True))
    assert play.plan.mesh == Mesh(tp=2, pp=2)
    assert play.plan.nodes in (("b", "b", "c", "c"), ("c", "c", "b", "b"))


def grown_slowly(play: Play, switch_s: float, changes: int) -> Play:
    """Three workers of which two train, after `changes` of the group and a switch of so many seconds."""
    play.running(2, step=3)
    facts = replace(
        play.facts, measured=replace(play.facts.measured, switch_s=switch_s, reconfigurations=changes)
    )
    play.state = replace(play.state, facts=facts)
    play.nodes("abc")
    play.ready()
    return play


def test_after_many_changes_a_dear_switch_is_not_worth_a_worker_more_until_it_is_quiet(real: Play) -> None:
    play = Play(replace(real.policy, max_steps=1_000_000))
    grown_slowly(play, switch_s=60.0, changes=36)  # one in 100 s
    said = play.wait(4.0).reason
    assert isinstance(play.phase, Running)
    assert "dp_replicate 2 stays: dp_replicate 3 promises" in said
    assert "a change takes 64 s, one is expected every 1.51 min" in said
    assert play.wait(30.0).reason == "nothing to do"
    for _ in range(80):
        play.wait(200.0)
        if isinstance(play.phase, Pausing):
            break
    assert isinstance(play.phase, Pausing), "quiet has grown longer"
    assert "more than dp_replicate 2" in play.outcome.reason


def test_a_cheap_switch_is_worth_a_worker_more_even_in_a_storm(real: Play) -> None:
    play = Play(replace(real.policy, max_steps=1_000_000))
    grown_slowly(play, switch_s=1.0, changes=36)
    play.wait(20.0)
    assert isinstance(play.phase, Pausing)


def test_a_worker_more_that_saves_no_round_is_left_idle(real: Play) -> None:
    """Of 16 micro-batches six workers run three at the most, and so do seven."""
    play = Play(replace(real.policy, max_steps=1_000_000, max_workers=7))
    play.running(6, step=3)
    play.nodes("abcdefg")
    play.ready()
    assert "dp_replicate 7 promises 0.0%" in play.wait(20.0).reason
    assert isinstance(play.phase, Running)


def test_what_a_transfer_took_says_how_dear_the_next_one_is() -> None:
    play = searching(tp=1, pp=2)
    play.running(2, step=3)
    facts = replace(
        play.facts, measured=replace(play.facts.measured, switch_s=10.0, moving_bytes=8e6, transfer_s=4.0)
    )
    question = to_change(facts, play.phase, play.policy, play.at)
    assert question.outlook.bytes_per_s == pytest.approx(2e6, rel=0.1)
    assert question.outlook.form_s == pytest.approx(6.0, rel=0.1)
    few = to_change(
        replace(facts, measured=replace(facts.measured, moving_bytes=100.0)), play.phase, play.policy, play.at
    ).outlook
    assert (few.bytes_per_s, few.form_s) == (None, pytest.approx(10.0, rel=0.1))


def test_paces_of_two_kinds_of_plans_are_told_and_that_of_one_is_not() -> None:
    play = searching(tp=1, dp_shard=1)
    play.running(4, step=1)
    first = play.plan.mesh

    def reported() -> dict[Mesh, float]:
        assert isinstance(play.phase, Running)
        outlook = to_change(play.facts, play.phase, play.policy, play.at).outlook
        return {pace.mesh: pace.step_s for pace in outlook.paces}

    for number in range(2, 10):
        play.step(number, seconds=4.0)
    assert reported() == {}
    play.lose(play.plan.workers[0])
    play.settle()
    play.go()
    assert play.plan.mesh != first
    play.step(play.facts.lineage.step + 1, seconds=60.0)  # the first of a group is longer
    for number in range(play.facts.lineage.step + 1, play.facts.lineage.step + 6):
        play.step(number, seconds=8.0)
    assert reported() == {first: 4.0, play.plan.mesh: 8.0}


def test_after_a_loss_survivors_of_a_pipeline_keep_what_they_hold() -> None:
    """Two stages in two copies; of the three that are left two go on as a pipeline, each on its stage."""
    play = searching(tp=1, pp=2, dp_shard=1)
    play.running(4, step=3)
    before = play.plan
    assert before.mesh == Mesh(pp=2, dp_replicate=2)
    play.lose(before.workers[0])
    play.settle()
    assert held(play.facts) == before
    (form,) = play.ordered(Form)
    stage = {worker: rank // 2 for rank, worker in enumerate(before.workers)}
    assert [stage[worker] for worker in form.plan.workers] == [0, 1]
    assert "moving" in play.outcome.reason or "no committed step is lost" in play.outcome.reason
