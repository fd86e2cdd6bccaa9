"""Keep survivors on their ranks where the new plan has the old mesh."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from elastic_train.planner.plan import Plan


def keep_places(plan: Plan, last: Plan | None, at_hand: Collection[tuple[str, int]] = ()) -> Plan:
    """The plan with its workers moved so that each stays on the rank that it had. Only where there are no
    replicas and no tp, and so it matters to nobody else who sits where.

    Whatever the newcomers' order, the survivors then have their whole state already, and what they logged of
    their stage goes on. A newcomer needs what the lost rank had: of `at_hand`, nodes and the ranks of which
    they hold copies, it gets one that its own node has.
    """
    alone = plan.mesh.pp * plan.mesh.dp_shard == plan.mesh.size
    if last is None or not alone or (plan.mesh, plan.stages) != (last.mesh, last.stages):
        return plan
    worker_slots = dict(zip(plan.workers, plan.nodes, strict=True))
    known = set(last.workers)
    others = [worker for worker in plan.workers if worker not in known]
    order = list(last.workers)
    vacant = [rank for rank, worker in enumerate(order) if worker not in worker_slots]
    for rank in sorted(vacant, key=lambda rank: not any((worker_slots[o], rank) in at_hand for o in others)):
        order[rank] = next((other for other in others if (worker_slots[other], rank) in at_hand), others[0])
        others.remove(order[rank])
    return replace(plan, workers=tuple(order), nodes=tuple(worker_slots[worker] for worker in order))
