"""Who does what in the first step of a generation, where every rank holds the whole model."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from elastic_train.cluster.messages import Offer
from elastic_train.geometry.coverage import uncovered
from elastic_train.geometry.fragments import Fragments
from elastic_train.planner.plan import Plan


def late_ranks(
    plan: Plan, everything: Fragments, offers: Sequence[Offer], same: Mapping[int, int]
) -> frozenset[int]:
    """Ranks that get their state while the others compute the first step, instead of before it.

    Where every rank holds everything, those that hold it already can compute a step without the others, who
    join in the sums, as long as nothing that is read changes before the vote.
    """
    if plan.mesh.dp_replicate < plan.world_size:
        return frozenset()
    complete = {
        rank
        for rank, i in same.items()
        if offers[i].steady and not offers[i].undone and uncovered(everything, offers[i].holds) is None
    }
    return frozenset(range(plan.world_size)) - complete if complete else frozenset()


def computed_by(
    plan: Plan, offers: Sequence[Offer], same: Mapping[int, int], late: Collection[int]
) -> dict[int, tuple[int, ...]]:
    """What ranks have of the first step already, where the step before broke: micro-batches by rank. Only
    where each rank holds the whole model is its gradient one that it goes on with.
    """
    if plan.mesh.dp_replicate < plan.world_size:
        return {}
    return {rank: offers[i].computed for rank, i in same.items() if rank not in late and offers[i].computed}
