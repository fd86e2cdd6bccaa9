"""Check whether the remaining ranks hold every part of the state.

Ranks that differ only in `dp_replicate` hold the same shards, so one of them is enough; in `cp` too, unless
dp_shard shards over both. Every other coordinate of the mesh has to be there.
"""

from __future__ import annotations

from collections.abc import Collection

from elastic_train.planner.plan import Mesh

Part = tuple[int, int]


def part(mesh: Mesh, rank: int) -> Part:
    """Which part of the state a rank holds: its stage, and its place there among those that differ."""
    return rank // (mesh.size // mesh.pp), rank % (mesh.shards * mesh.tp)


def parts(mesh: Mesh) -> tuple[Part, ...]:
    """Every part of the state, by stage."""
    return tuple(dict.fromkeys(part(mesh, rank) for rank in range(mesh.size)))


def missing(mesh: Mesh, ranks: Collection[int]) -> tuple[int, ...]:
    """The first rank of every part that none of `ranks` holds; empty where they cover the state."""
    held = {part(mesh, rank) for rank in ranks}
    first: dict[Part, int] = {}
    for rank in range(mesh.size):
        first.setdefault(part(mesh, rank), rank)
    return tuple(rank for at, rank in first.items() if at not in held)
