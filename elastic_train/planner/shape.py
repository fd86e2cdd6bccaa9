"""What the planner knows of a model: a row per tensor, and what training keeps of each."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorShape:
    """A logical tensor. Tensors of one `unit` are gathered and freed together under dp_shard.

    The unit "" is the root: what belongs to no other, gathered for the whole of forward and backward.
    """

    fqn: str
    shape: tuple[int, ...]
    item_bytes: int
    trainable: bool = True
    sharded: bool = True  # False: whole on every rank, as buffers are
    unit: str = ""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def shard_numel(self, ranks: int) -> int:
        """Elements of the largest shard: dim 0 in chunks of ceil(n / ranks), the others whole."""
        if not self.sharded or not self.shape:
            return self.numel
        return -(-self.shape[0] // ranks) * math.prod(self.shape[1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The tensors of a model and the bytes that training keeps beside each trainable element."""

    tensors: tuple[TensorShape, ...]
    slots: int = 2  # optimizer tensors per parameter: 2 for Adam's moments
    slot_bytes: int = 4
    gradient_bytes: int | None = None  # None: as the parameter
    master_bytes: int = 0  # of a second, more precise copy that the optimizer keeps
    compute_bytes: int | None = None  # of an element in a gathered unit; None: as the parameter
    micro_size: int = 1  # samples per micro-batch
    activation_bytes_per_sample: int = 0  # at the peak of forward and backward; 0: unknown

    @property
    def parameters(self) -> int:
        return sum(t.numel for t in self.tensors if t.sharded or t.trainable)
