"""Coverage: whether the ranks that are left hold every part of the state.

Ranks that differ only in `dp_replicate` hold the same shards, so one of them is enough. Every other
coordinate of the mesh has to be there.
"""

from __future__ import annotations

from collections.abc import Collection

from elastic_train.planner.plan import Mesh


def part(mesh: Mesh, rank: int) -> tuple[int, int]:
    """Which part of the state a rank holds: its stage, and its place there without `dp_replicate`."""
    inner = mesh.dp_shard * mesh.cp * mesh.tp
    return rank // (inner * mesh.dp_replicate), rank % inner


def missing(mesh: Mesh, ranks: Collection[int]) -> tuple[int, ...]:
    """The first rank of every part that none of `ranks` holds; empty where they cover the state."""
    held = {part(mesh, rank) for rank in ranks}
    first: dict[tuple[int, int], int] = {}
    for rank in range(mesh.size):
        first.setdefault(part(mesh, rank), rank)
    return tuple(rank for at, rank in first.items() if at not in held)


def covers(mesh: Mesh, ranks: Collection[int]) -> bool:
    """Whether `ranks` hold every part of the state between them."""
    return len({part(mesh, rank) for rank in ranks}) == mesh.size // mesh.dp_replicate
