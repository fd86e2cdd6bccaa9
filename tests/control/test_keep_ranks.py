"""Survivors keep their ranks where nobody else has their state, whatever the order in which workers came."""

from __future__ import annotations

import pytest

from elastic_train.control.keep_ranks import keep_places
from elastic_train.planner.plan import Mesh, Plan

pytestmark = pytest.mark.ring0


def plan(*workers: str, mesh: Mesh | None = None) -> Plan:
    mesh = mesh or Mesh(pp=len(workers))
    stages = tuple((s, s + 1) for s in range(mesh.pp)) if mesh.pp > 1 else ()
    nodes = tuple(f"node-{worker}" for worker in workers)
    return Plan(mesh=mesh, workers=workers, nodes=nodes, shares=((0, 1),) * mesh.dp, stages=stages)


def test_a_newcomer_takes_the_stage_that_was_lost() -> None:
    last = plan("a", "b", "c")
    kept = keep_places(plan("b", "c", "d"), last)
    assert kept.workers == ("d", "b", "c")
    assert kept.nodes == ("node-d", "node-b", "node-c")
    assert keep_places(plan("c", "d", "e"), last).workers == ("d", "e", "c")


@pytest.mark.parametrize("mesh", [Mesh(pp=3), Mesh(dp_shard=3)], ids=str)
def test_a_newcomer_takes_the_rank_whose_copy_its_node_has(mesh: Mesh) -> None:
    last = plan("a", "b", "c", mesh=mesh)
    at_hand = {("node-e", 0), ("node-b", 2)}
    kept = keep_places(plan("b", "d", "e", mesh=mesh), last, at_hand)
    assert kept.workers == ("e", "b", "d")
    assert kept.nodes == ("node-e", "node-b", "node-d")


def test_another_plan_is_left_as_it_is() -> None:
    last = plan("a", "b", "c")
    assert keep_places(plan("b", "c"), last).workers == ("b", "c")
    assert keep_places(plan("b", "c"), None).workers == ("b", "c")
    replicas = Mesh(dp_replicate=3)
    assert keep_places(plan("b", "c", "d", mesh=replicas), plan("a", "b", "c", mesh=replicas)).workers == (
        "b",
        "c",
        "d",
    )
