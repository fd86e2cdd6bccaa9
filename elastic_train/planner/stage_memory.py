"""Bytes that a stage's worker needs: state, gradients, gathered units, activations in flight, one at work.

A stage holds as many micro-batches as there are stages from it to the last, itself included, under 1F1B, and
2 (p - i - 1) + (v - 1) p + 1 pieces of 1 / v each under the interleaved schedule (Narayanan et al., SC 2021,
section 2.2). With split backwards every stage holds p (Qi et al., ICLR 2024, section 2.1). While
micro-batches accumulate, gradients are not yet divided among dp_shard.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from elastic_train.planner.memory_model import WorkerMemory
from elastic_train.planner.plan import Mesh, Recompute
from elastic_train.planner.rows import Floats, Tensors, activations, rows, working
from elastic_train.planner.stages import spans


class StageMemory:
    """Memory of any range of layers as a stage, by distance from the last stage.

    `accumulates`: a rank runs more than one micro-batch a step. The mesh's pp counts only with `virtual` > 1
    and with `split` backwards.
    """

    def __init__(
        self,
        tensors: Tensors,
        mesh: Mesh,
        recompute: Recompute,
        *,
        accumulates: bool,
        virtual: int = 1,
        split: bool = False,
    ) -> None:
        shape, self._mesh = tensors.shape, mesh
        self._virtual, self._split = virtual, split
        self._whole = mesh.dp_shard > 1 and accumulates  # gradients are kept whole while they accumulate
        self._once = mesh.dp_shard > 1 and not accumulates  # a whole gradient at a time, divided at once
        self.rows = table = rows(tensors, mesh)
        self._gradients = table.whole_gradients if self._whole else table.gradients
        self.kept = activations(shape, mesh, recompute)  # of a micro-batch, from forward to backward
        self.whole = (
            rows(tensors, replace(mesh, dp_shard=2)).gathered if mesh.dp_shard == 1 else table.gathered
        )
        # What recomputation of one block makes for its backward, and what a layer needs while it runs.
        self._working = activations(shape, mesh, "none") - self.kept + working(shape, mesh)
        # A tensor that arrives and one that leaves, whole on every rank.
        self._buffers = 2.0 * shape.boundary_bytes if mesh.pp > 1 else 0.0
        # Where positions are divided in between: what comes in and goes out is whole until its backward.
        spread = mesh.cp > 1 or shape.divides_positions(mesh.tp)
        self._end = float(shape.boundary_bytes) if mesh.pp > 1 and spread else 0.0
        fixed = spans(table.state + self._gradients + np.where(table.block, 0.0, table.gathered))
        blocks = np.minimum(spans(table.block.astype(float)), 2)
        fixed += _largest(np.where(table.block, table.gathered, 0.0)) * blocks
        if self._once:
            fixed += _largest(table.whole_gradients)
        self._fixed = fixed + _largest(self._working) + self._buffers
        self._spans = spans(self.kept)
        self._spans[1:] += self._end
        self._spans[:, :-1] += self._end

    def fits(self, memory_bytes: int, distance: int) -> NDArray[np.bool_]:
        """By [start, stop): whether the range fits as the stage at `distance` from the last."""
        flying = self._virtual * self._in_flight(distance) * self._spans
        return self._virtual * self._fixed + flying <= memory_bytes

    def of(self, positions: tuple[int, ...], pp: int) -> WorkerMemory:
        """Bytes on the worker that needs most under this cut into stages."""
        by_rank = [self._rank(positions, rank, pp) for rank in range(pp)]
        return max(by_rank, key=lambda memory: memory.training)

    def _rank(self, positions: tuple[int, ...], rank: int, pp: int) -> WorkerMemory:
        table, stages = self.rows, len(positions) - 1
        own = np.zeros(len(self.kept), bool)
        flying = 0.0
        for stage in range(rank, stages, pp):
            part = slice(positions[stage], positions[stage + 1])
            own[part] = True
            ends = self._end * ((stage > 0) + (stage < stages - 1))
            flying += self._in_flight(stages - 1 - stage) * (self.kept[part].sum() + ends)
        blocks = np.sort(np.where(own & table.block, table.gathered, 0.0))
        gathered = table.gathered[own & ~table.block].sum() + blocks[-2:].sum()
        if self._once:
            gathered += table.whole_gradients[own].max(initial=0.0)
        return WorkerMemory(
            weights=int(table.weights[own].sum()),
            optimizer=int(table.optimizer[own].sum()),
            master=int(table.master[own].sum()),
            gradients=int(self._gradients[own].sum()),
            gathered=int(gathered),
            activations=int(flying + self._working[own].max(initial=0.0) + self._buffers),
            kept=int(table.gradients[own].sum()),
        )

    def _in_flight(self, distance: int) -> float:
        """Micro-batches that the stage holds at its peak."""
        if self._virtual == 1:
            return self._mesh.pp if self._split else distance + 1
        pp = self._mesh.pp
        return (2 * (distance % pp) + (self._virtual - 1) * pp + 1) / self._virtual


def _largest(values: Floats) -> Floats:
    """The largest of [start, stop), as `spans` has the sums."""
    n = len(values)
    table = np.zeros((n + 1, n + 1))
    if values.any():
        later = np.where(np.tri(n, k=-1, dtype=bool), 0.0, values[None, :])
        table[:n, 1:] = np.maximum.accumulate(later, axis=1)
    return table
