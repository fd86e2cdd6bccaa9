"""Who keeps its place: workers that live on stay on their stage where the plan is the last one again."""

from __future__ import annotations

from dataclasses import replace

from elastic_train.planner.plan import Plan


def keep_stages(plan: Plan, last: Plan | None) -> Plan:
    """The plan with its workers moved so that each stays on the rank that it had. Only for pipelines without
    replicas or tp, where it matters to nobody else who sits where.

    Whatever the newcomers' order, the survivors then have their whole state already, and what they logged of
    their stage goes on.
    """
    alone = plan.mesh.pp > 1 and plan.mesh.pp * plan.mesh.dp_shard == plan.mesh.size
    if last is None or not alone or (plan.mesh, plan.stages) != (last.mesh, last.stages):
        return plan
    seats = dict(zip(plan.workers, plan.nodes, strict=True))
    others = [worker for worker in plan.workers if worker not in last.workers]
    order = [worker if worker in seats else others.pop(0) for worker in last.workers]
    return replace(plan, workers=tuple(order), nodes=tuple(seats[worker] for worker in order))
