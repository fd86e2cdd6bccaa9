"""Data-parallel meshes that fit the workers and the user's constraints, in order of preference."""

from __future__ import annotations

from elastic_train.axes import BATCH, MODEL
from elastic_train.config import Parallelism
from elastic_train.planner.plan import Infeasible, Mesh, counted


def meshes(limit: int, constraints: Parallelism) -> tuple[Mesh, ...]:
    """Every data-parallel mesh of at most `limit` ranks within the constraints, in order of preference.

    Without fixed axes, full replicas come first, then at least two copies, then one. With a fixed axis, most
    ranks come first. Of equals, fewest shards.
    """
    free = constraints.dp_replicate is None and constraints.dp_shard is None
    shards = [constraints.dp_shard] if constraints.dp_shard else range(1, limit + 1)
    found: list[tuple[int, int, int, int]] = []
    for shard in shards:
        most = limit // shard
        copies = [constraints.dp_replicate] if constraints.dp_replicate else range(1, most + 1)
        for replicate in copies:
            if replicate <= most:
                rung = 0 if shard == 1 else 1 if replicate > 1 else 2
                found.append((rung if free else 0, -replicate * shard, shard, replicate))
    return tuple(Mesh(dp_replicate=replicate, dp_shard=shard) for _, _, shard, replicate in sorted(found))


def impossible(workers: int, micro_batches: int, constraints: Parallelism) -> Infeasible | None:
    """Why no mesh is possible, with the nearest legal values; None where one is."""
    if workers == 0:
        return Infeasible(reason="no worker is there, one is enough to start")
    for axis in MODEL:
        if (getattr(constraints, axis) or 1) > 1:
            return Infeasible(
                reason=f"parallelism.{axis}={getattr(constraints, axis)} is not possible: without the "
                f"model's layers only data-parallel axes are planned, so the legal value is 1"
            )
    limit = min(workers, micro_batches)
    asked = {axis: n for axis in BATCH if (n := getattr(constraints, axis)) is not None}
    needed = 1
    for value in asked.values():
        needed *= value
    if needed <= limit:
        return None
    there = (
        f"{counted(workers, 'worker', ('is', 'are'))} there"
        if workers <= micro_batches
        else f"a step has {micro_batches} micro-batches, one per data-parallel rank at least"
    )
    most = {axis: limit // (needed // value) for axis, value in asked.items()}
    legal = [f"{axis} up to {n}" for axis, n in most.items() if n] or [f"a product up to {limit}"]
    named = " x ".join(f"{axis}={value}" for axis, value in asked.items())
    return Infeasible(
        reason=f"parallelism {named} needs {needed} data-parallel ranks and {there}; "
        f"legal is {' or '.join(legal)}"
    )
