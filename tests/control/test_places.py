"""Survivors of a pipeline keep their stages, whatever the order in which the seats came."""

from __future__ import annotations

import pytest

from elastic_train.control.places import keep_stages
from elastic_train.planner.plan import Mesh, Plan

pytestmark = pytest.mark.ring0


def plan(*workers: str, mesh: Mesh | None = None) -> Plan:
    mesh = mesh or Mesh(pp=len(workers))
    stages = tuple((s, s + 1) for s in range(mesh.pp)) if mesh.pp > 1 else ()
    nodes = tuple(f"node-{worker}" for worker in workers)
    return Plan(mesh=mesh, workers=workers, nodes=nodes, shares=((0, 1),) * mesh.dp, stages=stages)


def test_a_newcomer_takes_the_stage_that_was_lost() -> None:
    last = plan("a", "b", "c")
    kept = keep_stages(plan("b", "c", "d"), last)
    assert kept.workers == ("d", "b", "c")
    assert kept.nodes == ("node-d", "node-b", "node-c")
    assert keep_stages(plan("c", "d", "e"), last).workers == ("d", "e", "c")


def test_another_plan_is_left_as_it_is() -> None:
    last = plan("a", "b", "c")
    assert keep_stages(plan("b", "c"), last).workers == ("b", "c")
    assert keep_stages(plan("b", "c"), None).workers == ("b", "c")
    replicas = Mesh(dp_replicate=3)
    assert keep_stages(plan("b", "c", "d", mesh=replicas), plan("a", "b", "c", mesh=replicas)).workers == (
        "b",
        "c",
        "d",
    )
