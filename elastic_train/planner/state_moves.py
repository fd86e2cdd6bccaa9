"""State that a change of plan moves between workers.

What ranks hold is a range of layers x a share of dp_shard and cp x a share of tp (x of ep for experts, left
out: it moves with dp_shard). Two plans' shares overlap as intervals do. Without dp_shard the ranks of cp hold
the same.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from elastic_train.planner.plan import Mesh, Plan

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldParts:
    """What the ranks of a plan hold: its mesh and its stages, as ranges of blocks by stage."""

    mesh: Mesh
    stages: tuple[tuple[int, int], ...] = ()
    virtual: int = 1

    @classmethod
    def by(cls, plan: Plan) -> HeldParts:
        return cls(mesh=plan.mesh, stages=plan.stages, virtual=plan.virtual)

    @property
    def parts(self) -> int:
        """Ranks that hold something different."""
        return self.mesh.size // self.mesh.dp_replicate


def part_of(mesh: Mesh, rank: int) -> tuple[int, int]:
    """(part, copy) of a rank: ranks that differ only in dp_replicate hold the same part."""
    inner = mesh.copy_size
    row, place = divmod(rank, inner)
    stage, copy = divmod(row, mesh.dp_replicate)
    return stage * inner + place, copy


def rank_of(mesh: Mesh, part: int, copy: int) -> int:
    """The inverse of `part_of`."""
    inner = mesh.copy_size
    stage, place = divmod(part, inner)
    return (stage * mesh.dp_replicate + copy) * inner + place


def shared(old: HeldParts, new: HeldParts, blocks: tuple[float, ...]) -> Floats:
    """Bytes that an old part and a new part have in common, [old parts, new parts].

    `blocks` are the bytes of state of each layer: what is before the blocks, each block, what is after them.
    """
    layers: Floats = _layers(old, len(blocks)) * np.array(blocks) @ _layers(new, len(blocks)).T
    shards = _intervals(old.mesh.shards, new.mesh.shards)[np.ix_(_shards(old.mesh), _shards(new.mesh))]
    inner = np.kron(shards, _intervals(old.mesh.tp, new.mesh.tp))
    return np.kron(layers, inner).astype(np.float64)


def needed(new: HeldParts, blocks: tuple[float, ...]) -> Floats:
    """Bytes of each new part."""
    whole: Floats = _layers(new, len(blocks)) @ np.array(blocks)
    inner = new.parts // new.mesh.pp
    return np.repeat(whole / (new.mesh.shards * new.mesh.tp), inner)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """Bytes that workers have to receive: of all, and of the one that receives most."""

    total: float = 0.0
    most: float = 0.0


def moves(previous: Plan, plan: Plan, blocks: tuple[float, ...]) -> Moves:
    """What the plan's workers lack of their new parts. Workers that are new lack everything."""
    old, new = HeldParts.by(previous), HeldParts.by(plan)
    common, whole = shared(old, new, blocks), needed(new, blocks)
    before = {worker: part_of(old.mesh, rank)[0] for rank, worker in enumerate(previous.workers)}
    lacking: list[float] = []
    for rank, worker in enumerate(plan.workers):
        part, _ = part_of(new.mesh, rank)
        there = common[before[worker], part] if worker in before else 0.0
        lacking.append(max(0.0, float(whole[part] - there)))
    return Moves(total=math.fsum(lacking), most=max(lacking))


def least_moved(kept: Floats, whole: Floats, copies: int) -> float:
    """Lower bound of the bytes that the worker with most to receive gets, over all placements of parts.

    `kept` are the bytes that each worker that stays has of each part, `whole` the bytes of the parts.
    """
    if len(kept) < len(whole) * copies:  # somebody is new
        return float(whole.min())
    least = len(kept) - copies  # a part goes to `copies` workers: one has no more than the last of the best
    return float((whole - np.partition(kept, least, axis=0)[least]).max())


def even_stages(held: HeldParts, blocks: int) -> tuple[tuple[int, int], ...]:
    """The stages, or equal ones where a plan does not say."""
    if held.stages:
        return held.stages
    bounds = [blocks * i // held.mesh.pp for i in range(held.mesh.pp + 1)]
    return tuple(itertools.pairwise(bounds))


def _layers(held: HeldParts, layers: int) -> Floats:
    """Whether a pp index holds a layer, [pp, layers]."""
    blocks = max(0, layers - 2)
    there = np.zeros((held.mesh.pp, layers))
    for stage, (start, stop) in enumerate(even_stages(held, blocks)):
        there[stage % held.mesh.pp, 1 + start : 1 + stop] = 1.0
    there[0, 0] = there[-1, -1] = 1.0
    return there


def _shards(mesh: Mesh) -> Ints:
    """Which share of the state each place along dp_shard and cp holds."""
    places = np.arange(mesh.dp_shard * mesh.cp)
    return places if mesh.shards > 1 else np.zeros_like(places)


def _intervals(old: int, new: int) -> Floats:
    """Share of the whole that interval i of `old` equal ones has in common with interval j of `new`."""
    i, j = np.arange(old)[:, None], np.arange(new)[None, :]
    common = np.minimum((i + 1) * new, (j + 1) * old) - np.maximum(i * new, j * old)
    return np.maximum(common, 0) / (old * new)
