"""Checks meshes against the memory of a worker, and explains why none fits."""

from __future__ import annotations

from collections.abc import Sequence

from elastic_train.planner.memory_model import WorkerMemory, memory_per_worker
from elastic_train.planner.model_shape import ModelShape
from elastic_train.planner.plan import Infeasible, Mesh, bytes_text


class Fit:
    """Memory per worker against what there is, computed once per mesh. Without a shape or a size all fits."""

    def __init__(self, shape: ModelShape | None, memory_bytes: int | None, previous: Mesh | None) -> None:
        self._shape = shape
        self._there = memory_bytes
        self._previous = previous
        self._known: dict[int, WorkerMemory] = {}

    def fits(self, mesh: Mesh, *, live: bool) -> bool:
        """Whether a step fits; `live`: and the old shards beside the new ones."""
        if self._shape is None or self._there is None:
            return True
        memory = self._of(self._shape, mesh)
        return max(memory.training, memory.resharding if live else 0) <= self._there

    def used(self, mesh: Mesh) -> str:
        """What a worker uses under the mesh, as the end of a sentence."""
        if self._shape is None:
            return ""
        of = "" if self._there is None else f" of {bytes_text(self._there)}"
        return f"; {bytes_text(self._of(self._shape, mesh).training)}{of} per worker"

    def infeasible(self, meshes: Sequence[Mesh], workers: int) -> Infeasible:
        """Why none of the meshes fits, and what would."""
        assert self._shape is not None
        assert self._there is not None
        shape, there = self._shape, self._there
        best = min(meshes, key=lambda m: self._of(shape, m).training)
        memory = self._of(shape, best)
        remedies: list[str] = []
        more = range(1, 4 * workers + 64)
        shards = next((s for s in more if self.fits(Mesh(dp_shard=s), live=False)), None)
        if shards is not None:
            remedies.append(
                f"dp_shard {shards} would fit"
                + (f" on {shards} workers with a micro-batch each" if shards > workers else "")
            )
        room = there - (memory.training - memory.activations)
        per_sample = shape.activation_bytes_per_sample
        if per_sample and room >= per_sample:
            remedies.append(f"micro_size {room // per_sample} would fit")
        if not remedies:
            remedies.append("more workers do not help, larger ones do")
        return Infeasible(
            reason=f"{shape.parameters:,} parameters need {bytes_text(memory.training)} per worker under "
            f"{best} ({memory}) and a worker has {bytes_text(there)}: {', or '.join(remedies)}"
        )

    def _of(self, shape: ModelShape, mesh: Mesh) -> WorkerMemory:
        if mesh.dp_shard not in self._known:
            self._known[mesh.dp_shard] = memory_per_worker(shape, mesh, previous=self._previous)
        return self._known[mesh.dp_shard]
