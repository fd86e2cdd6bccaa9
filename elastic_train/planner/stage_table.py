"""Stage times of all candidates that cut layers alike, worked out once.

`Times` knows no memory and bounds from below; `Fitting` counts only cuts that fit the memory of a worker.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from elastic_train.planner.candidates import Candidate
from elastic_train.planner.hardware import Hardware
from elastic_train.planner.plan import Mesh, Recompute
from elastic_train.planner.rows import Floats, seconds, tensors_of
from elastic_train.planner.shape import ModelShape
from elastic_train.planner.stage_memory import StageMemory
from elastic_train.planner.stages import cut, slowest

Cut = tuple[int, int, int, Recompute]


@dataclass(frozen=True, eq=False)
class Times:
    """Seconds per layer under tp, cp, ep and a recomputation."""

    each: Floats

    @property
    def whole(self) -> float:
        return float(self.each.sum())

    @cached_property
    def slowest(self) -> Floats:
        """By number of stages - 1."""
        return slowest(self.each, len(self.each))


class StageTable:
    """Times and memory by what they depend on."""

    def __init__(self, shape: ModelShape, hardware: Hardware, workers: int) -> None:
        self._workers = workers
        self._shape, self._hardware = shape, hardware
        self.tensors = tensors_of(shape)
        self._times: dict[Cut, Times] = {}
        self._memory: dict[tuple[Mesh, Recompute, bool, int], StageMemory] = {}
        self._fitting: dict[tuple[Mesh, Recompute, bool, int], Floats] = {}

    def times(self, tp: int, cp: int, ep: int, recompute: Recompute) -> Times:
        key = (tp, cp, ep, recompute)
        if key not in self._times:
            mesh = Mesh(tp=tp, cp=cp, ep=ep)
            computing, moving = seconds(self._shape, mesh, recompute, self._hardware.inside)
            self._times[key] = Times(computing + moving)
        return self._times[key]

    def of(self, candidate: Candidate) -> Times:
        mesh = candidate.mesh
        return self.times(mesh.tp, mesh.cp, mesh.ep, candidate.recompute)

    def memory(self, candidate: Candidate, rounds: int) -> StageMemory:
        key = self._key(candidate, rounds)
        if key not in self._memory:
            mesh, recompute, accumulates, virtual = key
            self._memory[key] = StageMemory(
                self.tensors, mesh, recompute, accumulates=accumulates, virtual=virtual
            )
        return self._memory[key]

    def slowest(self, candidate: Candidate, rounds: int) -> float:
        """Time of the slowest stage of the best cut that fits; infinite where none does."""
        stages = candidate.mesh.pp * candidate.virtual
        times = self.of(candidate)
        if self._hardware.memory_bytes is None:
            return float(times.slowest[stages - 1])
        key = self._key(candidate, rounds)
        if key not in self._fitting:
            memory, there = self.memory(candidate, rounds), self._hardware.memory_bytes
            most = stages
            if candidate.virtual == 1 and candidate.mesh.pp > 1:
                inner = candidate.mesh.tp * candidate.mesh.cp * candidate.mesh.dp_shard
                most = min(len(times.each), self._workers // inner)
            self._fitting[key] = slowest(times.each, most, lambda distance: memory.fits(there, distance))
        return float(self._fitting[key][stages - 1])

    def cut(self, candidate: Candidate, rounds: int) -> tuple[int, ...]:
        """The positions of the best cut that fits."""
        memory, there = self.memory(candidate, rounds), self._hardware.memory_bytes
        return cut(
            self.of(candidate).each,
            candidate.mesh.pp * candidate.virtual,
            self.slowest(candidate, rounds),
            None if there is None else lambda distance: memory.fits(there, distance),
        )

    def _key(self, candidate: Candidate, rounds: int) -> tuple[Mesh, Recompute, bool, int]:
        """Copies never matter; the number of stages only where stages are interleaved."""
        mesh = replace(candidate.mesh, dp_replicate=1)
        if candidate.virtual == 1:
            mesh = replace(mesh, pp=min(mesh.pp, 2))
        return mesh, candidate.recompute, rounds > 1 and mesh.dp_shard > 1, candidate.virtual


def by_pp(layers: Floats, positions: tuple[int, ...], pp: int) -> Floats:
    """Sums by pp index."""
    sums = np.diff(np.concatenate([[0.0], np.cumsum(layers)])[list(positions)])
    return sums.reshape(-1, pp).sum(axis=0)
