"""A device's memory that is too small for a plan: the plan is left, and the run goes on with another one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from elastic_train.control.events import Cause
from elastic_train.control.journal_codec import decode_state, encode_state, fold
from elastic_train.control.states import Ended, Forming, Running
from elastic_train.planner.search import Search
from elastic_train.testing.simulator import simulated_policy
from tests.control.conftest import Play
from tests.planner.test_search import MODEL

pytestmark = pytest.mark.ring0


@pytest.fixture
def unmeasured() -> Iterator[Play]:
    """Nobody knows how much memory a worker has, as of GPUs."""
    policy = simulated_policy(max_steps=20, max_failures=5)
    play = Play(replace(policy, plan=Search(micro_batches=12, shape=MODEL), standby=0))
    yield play
    assert fold(play.journal, play.policy) == play.state


def run_out(play: Play, peak: int, *, phase: str = "backward") -> None:
    """Every rank says so."""
    for worker in play.plan.workers:
        said = f"{worker}: out of memory"
        play.settle(worker, error=Cause(kind="memory", detail=said, phase=phase, step=1, peak=peak))
    if isinstance(play.phase, Forming):
        play.go()


def test_a_plan_that_needs_too_much_is_left_for_one_that_is_cut_further(unmeasured: Play) -> None:
    play = unmeasured.running(4)
    run_out(play, 0)  # elsewhere, and of the host
    assert play.plan.mesh.dp_shard == 1
    run_out(play, 4000)
    assert isinstance(play.phase, Running), "no second time in the same phase: another plan"
    assert play.plan.mesh.dp_shard == 4, "the old shards fit beside these alone"
    assert [(plan.mesh.dp_shard, peak) for plan, peak in play.facts.failures.exceeded] == [(1, 4000)]
    assert decode_state(encode_state(play.state)) == play.state


def test_where_no_plan_needs_less_the_run_ends_with_the_figures(unmeasured: Play) -> None:
    play = unmeasured.running(2)
    run_out(play, 5 << 30)
    run_out(play, 4 << 30)
    assert isinstance(play.phase, Ended)
    assert play.phase.outcome == "infrastructure"
    assert "5.0 GiB" in play.phase.detail
    assert "4.0 GiB" in play.phase.detail


def test_memory_that_nobody_measured_still_ends_the_run_the_second_time(unmeasured: Play) -> None:
    play = unmeasured.running(4)
    run_out(play, 0)
    assert play.plan.mesh.dp_shard == 1
    run_out(play, 0)
    assert isinstance(play.phase, Ended)
    assert "likely out of memory, twice" in play.phase.detail
