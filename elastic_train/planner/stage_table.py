"""Stage times and memory of all candidates that cut layers alike, worked out once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from elastic_train.axes import LAYERS
from elastic_train.planner.hardware import Hardware
from elastic_train.planner.mesh_candidates import Candidate
from elastic_train.planner.model_shape import ModelShape
from elastic_train.planner.plan import Mesh, Recompute
from elastic_train.planner.rows import Floats, seconds, tensors_of
from elastic_train.planner.stage_memory import StageMemory
from elastic_train.planner.stages import Slowest, cut

Kind = tuple[Mesh, Recompute, bool, int, bool]


class Times:
    """Seconds per layer under the axes that divide one, and a recomputation."""

    def __init__(self, each: Floats) -> None:
        self.each, self.whole = each, float(each.sum())
        self.slowest = Slowest(each)


class StageTable:
    """Times and memory by what they depend on."""

    def __init__(self, shape: ModelShape, hardware: Hardware) -> None:
        self._shape, self._hardware = shape, hardware
        self.tensors = tensors_of(shape)
        self._times: dict[tuple[int | Recompute, ...], Times] = {}
        self._memory: dict[Kind, StageMemory] = {}
        self._fitting: dict[Kind, Slowest] = {}

    def of(self, candidate: Candidate) -> Times:
        divided = {axis: getattr(candidate.mesh, axis) for axis in LAYERS}
        key = (*divided.values(), candidate.recompute)
        if key not in self._times:
            mesh, recompute = Mesh(**divided), candidate.recompute
            computing, moving = seconds(self._shape, mesh, recompute, self._hardware.inside)
            self._times[key] = Times(computing + moving)
        return self._times[key]

    def memory(self, candidate: Candidate, rounds: int) -> StageMemory:
        key = self._key(candidate, rounds)
        if key not in self._memory:
            mesh, recompute, accumulates, virtual, split = key
            self._memory[key] = StageMemory(
                self.tensors, mesh, recompute, accumulates=accumulates, virtual=virtual, split=split
            )
        return self._memory[key]

    def slowest(self, candidate: Candidate, rounds: int) -> float:
        """Time of the slowest stage of the best cut that fits; infinite where none does."""
        stages = candidate.mesh.pp * candidate.virtual
        times = self.of(candidate)
        if self._hardware.memory_bytes is None:
            return times.slowest.of(stages)
        key = self._key(candidate, rounds)
        if key not in self._fitting:
            memory, there = self.memory(candidate, rounds), self._hardware.memory_bytes
            self._fitting[key] = Slowest(times.each, lambda distance: memory.fits(there, distance))
        return self._fitting[key].of(stages)

    def cut(self, candidate: Candidate, rounds: int) -> tuple[int, ...]:
        """The positions of the best cut that fits."""
        memory, there = self.memory(candidate, rounds), self._hardware.memory_bytes
        return cut(
            self.of(candidate).each,
            candidate.mesh.pp * candidate.virtual,
            self.slowest(candidate, rounds),
            None if there is None else lambda distance: memory.fits(there, distance),
        )

    def _key(self, candidate: Candidate, rounds: int) -> Kind:
        """Copies never matter; the number of stages only where stages are interleaved or backwards split."""
        mesh = replace(candidate.mesh, dp_replicate=1)
        if candidate.virtual == 1 and not candidate.split:
            mesh = replace(mesh, pp=min(mesh.pp, 2))
        accumulates = rounds > 1 and mesh.dp_shard > 1
        return mesh, candidate.recompute, accumulates, candidate.virtual, candidate.split


def by_pp(layers: Floats, positions: tuple[int, ...], pp: int) -> Floats:
    """Sums by pp index."""
    sums = np.diff(np.concatenate([[0.0], np.cumsum(layers)])[list(positions)])
    return sums.reshape(-1, pp).sum(axis=0)
