"""A node that is slow is left where a person asked for it, and where that is worth a switch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic_train.config import Batch, RunSpec
from elastic_train.control.commands import Form, Pause, StartWorker, StopWorker
from elastic_train.control.events import Adopted, Node, NodesChanged, Straggling, TermBegan
from elastic_train.control.states import Forming, Pausing, Running, Waiting
from elastic_train.errors import ConfigError
from elastic_train.testing.simulator import simulated_policy

pytestmark = pytest.mark.ring0


def spec(**changes: object) -> RunSpec:
    fields: dict = {
        "name": "run",
        "storage_path": "/nowhere",
        "batch": Batch(global_size=8, micro_size=1),
        "max_steps": 9,
        "min_workers": 1,
        "max_workers": 2,
        **changes,
    }
    return RunSpec(**fields)


def slow(play, worker: str, node: str, factor: float) -> None:
    rank = play.plan.workers.index(worker)
    play(
        Straggling,
        generation=play.facts.lineage.generation,
        worker=worker,
        node=node,
        rank=rank,
        factor=factor,
    )


def asked(play, factor: float = 2.0) -> None:
    play.policy = replace(play.policy, evict_slower_than=factor, max_steps=1000)


def test_the_group_pauses_goes_on_without_the_slow_node_and_loses_no_step(replicated) -> None:
    play = replicated
    asked(play)
    play.running(4, step=5)
    worker, node = play.plan.workers[1], play.plan.nodes[1]
    slow(play, worker, node, 4.0)
    assert isinstance(play.phase, Pausing)
    assert play.ordered(Pause)
    assert f"leaving {node} for 20 s, which is slow" in play.outcome.reason
    play.settle()
    assert isinstance(play.phase, Forming)
    (form,) = play.ordered(Form)
    assert node not in form.plan.nodes
    assert worker in form.holders, "what it holds is handed on"
    assert play.facts.lineage.step == 5
    assert play.facts.failures.count == 0
    play.go()
    assert isinstance(play.phase, Running)
    assert [c.worker for c in play.ordered(StopWorker)] == [worker]
    assert play.facts.membership.evicted == ()
    play.step(6)
    play.wait(1.0)
    assert not any(c.node == node for c in play.ordered(StartWorker)), "it is in quarantine"


def test_it_may_come_back_when_its_quarantine_is_over(replicated) -> None:
    play = replicated
    asked(play)
    play.running(4, step=5)
    worker, node = play.plan.workers[1], play.plan.nodes[1]
    slow(play, worker, node, 4.0)
    play.settle()
    play.go()
    play.step(6)
    play.wait(61.0)
    assert [c.node for c in play.ordered(StartWorker)] == [node]


def test_a_group_that_breaks_while_it_leaves_a_node_still_leaves_it(replicated) -> None:
    play = replicated
    asked(play)
    play.running(4, step=5)
    worker, node = play.plan.workers[1], play.plan.nodes[1]
    slow(play, worker, node, 4.0)
    lost = play.plan.workers[3]
    play.lose(lost)
    play.settle()
    assert node not in play.plan.nodes
    assert isinstance(play.phase, Forming | Waiting)


@pytest.mark.parametrize(("limit", "factor"), [(None, 9.0), (3.0, 2.5)])
def test_nothing_is_left_without_being_asked_for_or_below_the_limit(
    replicated, limit: float | None, factor: float
) -> None:
    play = replicated
    play.policy = replace(play.policy, evict_slower_than=limit, max_steps=1000)
    play.running(4, step=5)
    slow(play, play.plan.workers[1], play.plan.nodes[1], factor)
    assert isinstance(play.phase, Running)
    assert play.commands == ()
    assert play.facts.membership.slow


def test_a_node_is_kept_where_too_few_workers_would_be_left(replicated) -> None:
    play = replicated
    asked(play)
    play.policy = replace(play.policy, min_workers=4)
    play.running(4, step=5)
    slow(play, play.plan.workers[1], play.plan.nodes[1], 4.0)
    assert isinstance(play.phase, Running)
    assert "is kept: 3 workers are ready, at least 4 are needed" in play.outcome.reason


def test_a_node_is_kept_where_the_others_would_take_longer_for_its_part(replicated) -> None:
    play = replicated
    asked(play, 1.5)
    play.policy = replace(play.policy, min_workers=1)
    play.running(2, step=5)
    slow(play, play.plan.workers[1], play.plan.nodes[1], 1.8)
    assert isinstance(play.phase, Running)
    assert "1 worker without it would save 0 s" in play.outcome.reason


def test_a_limit_below_what_counts_as_slow_is_refused() -> None:
    assert spec(evict_slower_than=2.0).evict_slower_than == 2.0
    with pytest.raises(ConfigError, match=r"evict_slower_than.*less than 1\.5"):
        spec(evict_slower_than=1.2)


def test_a_plan_that_takes_some_workers_stands_in_as_many_racks_as_it_can(replicated) -> None:
    """Four nodes in two racks, named so that those of one rack are the oldest; two workers are used."""
    play = replicated
    play.policy = replace(simulated_policy(replicas=2, max_steps=20, max_failures=3), max_workers=2)
    play.begin(0)
    racks = {"a": "left", "b": "left", "c": "right", "d": "right"}
    play(NodesChanged, nodes=tuple(Node(name=n, slots=1, domain=rack) for n, rack in racks.items()))
    play.ready()
    play.wait(30.0)
    assert {racks[node] for node in play.plan.nodes} == {"left", "right"}


def test_a_slow_node_is_kept_where_too_few_are_left_without_it(play) -> None:
    """While the group pauses for it, another node is lost."""
    asked(play)
    play.running(3, step=5)
    slow(play, "w0003", "c", 4.0)
    assert play.facts.membership.evicted == ("c",)
    play.nodes("ac")
    play.settle("w0001", "w0003")
    assert isinstance(play.phase, Forming)
    assert play.plan.nodes == ("a", "c")
    assert play.facts.membership.evicted == ()


def test_a_slow_node_is_staffed_again_where_it_is_needed(play) -> None:
    """Its quarantine was for its speed, and the node is well."""
    asked(play)
    play.running(3, step=5)
    slow(play, "w0003", "c", 4.0)
    play.settle()
    play.go()
    assert [w.node for w in play.facts.membership.workers] == ["a", "b"]
    play.nodes("ac")
    assert [c.node for c in play.ordered(StartWorker)] == ["c"]


def test_a_run_that_is_submitted_again_uses_all_nodes(play) -> None:
    asked(play)
    play.running(3, step=5)
    slow(play, "w0003", "c", 4.0)
    play(TermBegan, term=2, stored=None, ever_stored=False)
    play(Adopted, running=())
    play.nodes("ac")
    assert [c.node for c in play.ordered(StartWorker)] == ["a", "c"]
    assert (play.facts.membership.evicted, play.facts.membership.slow, play.facts.membership.flaps) == (
        (),
        (),
        (),
    )


def test_a_node_whose_workers_end_unused_rests_no_longer_than_at_first_where_it_is_the_only_one(play) -> None:
    play.begin(2)
    for _ in range(60):
        for worker in play.facts.membership.workers:
            if worker.node == "b":
                play.lose(worker.name)
        play.wait(2.0)
        play.ready(*(w.name for w in play.facts.membership.workers if w.node == "a"))
    assert max(f.quarantines for f in play.facts.membership.flaps) >= 3
    waited = 0.0
    while [w.node for w in play.facts.membership.workers] != ["a", "b"]:
        assert waited < 21.0
        play.wait(1.0)
        waited += 1.0
