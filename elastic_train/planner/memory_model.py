"""Bytes that one worker needs under a mesh.

Model states per element and their division by the shard axis: Rajbhandari et al., "ZeRO: Memory Optimizations
Toward Training Trillion Parameter Models" (SC 2020), sections 3.1 and 5. Peak of gathered units beside the
shards: Zhao et al., "PyTorch FSDP" (VLDB 2023), section 3.2.1. Both count the largest shard here, because the
worker that holds it is the one that runs out.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from elastic_train.planner.model_shape import ModelShape
from elastic_train.planner.plan import Mesh, bytes_text


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMemory:
    """Bytes on the worker that needs most, by what they are for."""

    weights: int
    optimizer: int
    master: int
    gradients: int
    gathered: int
    activations: int
    held: int = 0  # old shards, kept until the new ones are complete
    kept: int = 0  # the gradient of the last vote, kept for ranks that have yet to apply it

    @property
    def state(self) -> int:
        """What survives a step: it is moved when the mesh changes."""
        return self.weights + self.optimizer + self.master

    @property
    def training(self) -> int:
        """The peak within a step."""
        return self.state + self.gradients + self.gathered + self.activations

    @property
    def resharding(self) -> int:
        """The peak while the mesh changes: old and new state side by side, nothing else of a step."""
        return self.state + self.held + self.kept

    def __str__(self) -> str:
        parts = ("weights", "optimizer", "master", "gradients", "gathered", "activations")
        sizes = ((name, getattr(self, name)) for name in parts)
        return ", ".join(f"{name} {bytes_text(size)}" for name, size in sizes if size)


def memory_per_worker(shape: ModelShape, mesh: Mesh, *, previous: Mesh | None = None) -> WorkerMemory:
    """Bytes per worker under `mesh`; replicas don't change them.

    With `previous`, old shards are held while the cut changes; where it stays, state stays in place.
    """
    trainable = [t for t in shape.tensors if t.trainable]
    elements = sum(t.shard_numel(mesh.dp_shard) for t in trainable)
    gradients = sum(t.shard_numel(mesh.dp_shard) * (shape.gradient_bytes or t.item_bytes) for t in trainable)
    return WorkerMemory(
        weights=sum(t.shard_numel(mesh.dp_shard) * t.item_bytes for t in shape.tensors),
        optimizer=elements * shape.slots * shape.slot_bytes,
        master=elements * shape.master_bytes,
        gradients=gradients,
        gathered=_gathered(shape, mesh),
        activations=shape.micro_size * shape.activation_bytes_per_sample,
        held=memory_per_worker(shape, previous).state
        if previous and previous.dp_shard != mesh.dp_shard
        else 0,
    )


def _gathered(shape: ModelShape, mesh: Mesh) -> int:
    """The root and the two largest units whole (one computes, one arrives), and one whole gradient.

    Gathered tensors are padded to equal chunks. Without a shard axis a unit is a copy only where it computes
    in another precision than it is kept in.
    """
    weights: defaultdict[str, int] = defaultdict(int)
    gradients: defaultdict[str, int] = defaultdict(int)
    for tensor in shape.tensors:
        item = shape.compute_bytes or tensor.item_bytes
        if not tensor.sharded or (mesh.dp_shard == 1 and item == tensor.item_bytes):
            continue
        padded = tensor.shard_numel(mesh.dp_shard) * mesh.dp_shard
        weights[tensor.unit] += padded * item
        gradients[tensor.unit] += padded * item * tensor.trainable
    root = weights.pop("", 0)
    return root + sum(sorted(weights.values())[-2:]) + max(gradients.values(), default=0)
