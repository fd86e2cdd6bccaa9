"""Enumerates candidate meshes, schedules and recomputation, as columns.

Of the numbers of copies that give a pipeline equally many micro-batches, the fewest are fastest, because sums
over copies grow with them, and the most leave no worker idle: the others are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from elastic_train.axes import AXES
from elastic_train.config import Parallelism
from elastic_train.planner.hardware import Fleet, Hardware
from elastic_train.planner.limits import AxisLimits
from elastic_train.planner.model_shape import ModelShape
from elastic_train.planner.plan import Mesh, Plan, Recompute, Schedule

Ints = NDArray[np.int64]
RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A way to run: a mesh, stages per pp index, recomputation, and whether backwards are split."""

    mesh: Mesh
    virtual: int
    recompute: Recompute
    split: bool = False

    @property
    def schedule(self) -> Schedule:
        if self.split:
            return "ZeroBubble"
        return "1F1B" if self.virtual == 1 else "Interleaved1F1B"

    @classmethod
    def of(cls, plan: Plan) -> Candidate:
        split = plan.schedule == "ZeroBubble"
        return cls(mesh=plan.mesh, virtual=plan.virtual, recompute=plan.recompute, split=split)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidates:
    """Columns; `recompute` are indices of RECOMPUTES, `split` is 1 where backwards are split."""

    pp: Ints
    dp_replicate: Ints
    dp_shard: Ints
    cp: Ints
    tp: Ints
    ep: Ints
    virtual: Ints
    recompute: Ints
    split: Ints
    rounds: Ints

    def __len__(self) -> int:
        return len(self.pp)

    @property
    def shards(self) -> Ints:
        """As `Mesh.shards`."""
        return np.where(self.dp_shard > 1, self.dp_shard * self.cp, 1)

    def at(self, i: int) -> Candidate:
        return Candidate(
            mesh=Mesh(**{axis: int(getattr(self, axis)[i]) for axis in AXES}),
            virtual=int(self.virtual[i]),
            recompute=RECOMPUTES[int(self.recompute[i])],
            split=bool(self.split[i]),
        )


def candidates(
    fleet: Fleet,
    known: AxisLimits,
    constraints: Parallelism,
    micro_batches: int,
    *,
    layers: int,
    kinds: tuple[int, ...],
    virtuals: tuple[int, ...],
    zero_bubble: bool = False,
) -> Candidates:
    """Every candidate within the limits and the constraints.

    With `zero_bubble` those with a split backward too: sharded gradients are reduced as a backward goes, and
    recomputation would run once for each part, so neither is combined with it.
    """
    cp, ep = constraints.cp or 1, constraints.ep or 1
    blocks: list[Ints] = []
    for tp in (constraints.tp,) if constraints.tp else known.tp:
        if known.widths.heads_problem(tp, cp):
            continue
        room = fleet.room(tp * cp) // (tp * cp)
        for pp in (constraints.pp,) if constraints.pp else known.pp:
            grid = _data_axes(min(room // pp, micro_batches // pp), constraints, micro_batches)
            if ep > 1:
                grid = grid[grid[:, 1] % ep == 0]
            for virtual in virtuals:
                rows = grid[_interleaves(grid, pp, virtual, micro_batches, layers)]
                fixed = np.broadcast_to(np.array([pp, cp, tp, ep, virtual]), (len(rows), 5))
                blocks.append(np.hstack([fixed, rows]))
    table = np.vstack(blocks) if blocks else np.zeros((0, 7), np.int64)
    divided = table[(table[:, 0] > 1) & (table[:, 4] == 1) & (table[:, 6] == 1)]
    if not zero_bubble or RECOMPUTES.index("none") not in kinds:
        divided = divided[:0]
    kind = np.concatenate([np.tile(np.array(kinds, np.int64), len(table)), np.zeros(len(divided), np.int64)])
    split = np.repeat([0, 1], [len(table) * len(kinds), len(divided)])
    table = np.vstack([np.repeat(table, len(kinds), axis=0), divided])
    pp, cp_, tp_, ep_, virtual_, replicate, shard = table.T
    return Candidates(
        pp=pp,
        dp_replicate=replicate,
        dp_shard=shard,
        cp=cp_,
        tp=tp_,
        ep=ep_,
        virtual=virtual_,
        recompute=kind,
        split=split,
        rounds=-(-micro_batches // (replicate * shard)),
    )


def recomputes(allowed: tuple[Recompute, ...], shape: ModelShape, hardware: Hardware) -> tuple[int, ...]:
    """Indices of RECOMPUTES, of the allowed ones those that may help: it is memory that they save."""
    saves = {
        "none": True,
        "selective": any(row.dropped_bytes for row in shape.layers),
        "full": any(row.activation_bytes for row in shape.layers),
    }
    useful = [
        kind for kind in allowed if saves[kind] and (kind == "none" or hardware.memory_bytes is not None)
    ]
    return tuple(i for i, kind in enumerate(RECOMPUTES) if kind in (useful or allowed[:1]))


def _data_axes(limit: int, constraints: Parallelism, micro_batches: int) -> Ints:
    """(dp_replicate, dp_shard) with a product of at most `limit`."""
    found: set[tuple[int, int]] = set()
    shards = (constraints.dp_shard,) if constraints.dp_shard else range(1, limit + 1)
    for shard in shards:
        most = limit // shard
        if constraints.dp_replicate:
            if constraints.dp_replicate <= most:
                found.add((constraints.dp_replicate, shard))
            continue
        for copies in _copies(most, shard, micro_batches):
            found.add((copies, shard))
    return np.array(sorted(found), np.int64).reshape(-1, 2)


def _copies(most: int, shard: int, micro_batches: int) -> Iterator[int]:
    """The fewest and the most copies for each number of micro-batches of a rank."""
    copies = 1
    while copies <= most:
        rounds = -(-micro_batches // (copies * shard))
        yield copies
        last = most if rounds == 1 else min(most, (-(-micro_batches // (rounds - 1)) - 1) // shard)
        if last > copies:
            yield last
        copies = max(last, copies) + 1


def _interleaves(grid: Ints, pp: int, virtual: int, micro_batches: int, layers: int) -> NDArray[np.bool_]:
    """Where the schedule may run: the interleaved one wants equal rounds of micro-batches."""
    if virtual == 1:
        return np.ones(len(grid), bool)
    if pp == 1 or pp * virtual > layers:
        return np.zeros(len(grid), bool)
    dp = grid[:, 0] * grid[:, 1]
    own = micro_batches // dp
    return (micro_batches % dp == 0) & (own % np.maximum(1, own // pp) == 0)
