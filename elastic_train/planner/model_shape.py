"""What the planner knows of a model: rows per tensor and per layer, and what training keeps of each."""

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
    layer: int = 0  # row of ModelShape.layers that it belongs to
    tp_dim: int | None = None  # the dim that tensor parallelism cuts; None: every rank of tp holds it
    expert: bool = False  # dim 0 numbers experts, which ep divides

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def shard_numel(self, ranks: int, *, tp: int = 1, ep: int = 1) -> int:
        """Elements of the largest shard: dim 0 in chunks of ceil(n / ranks), after the cuts of tp and ep.

        ep is a part of the ranks.
        """
        sizes = list(self.shape)
        if tp > 1 and self.tp_dim is not None:
            sizes[self.tp_dim] = -(-sizes[self.tp_dim] // tp)
        if ep > 1 and self.expert:
            sizes[0] = -(-sizes[0] // ep)
            ranks = -(-ranks // ep)
        if self.sharded and sizes:
            sizes[0] = -(-sizes[0] // ranks)
        return math.prod(sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A row of the model that stages do not cut: a block, or what comes before or after the blocks.

    Seconds and bytes are those of one micro-batch on one worker, whole: tp and cp divide them.
    """

    name: str
    seconds: float  # forward and backward, nothing recomputed
    activation_bytes: int = 0  # kept from forward to backward
    dropped_bytes: int = 0  # of these, what recompute "selective" does not keep
    dropped_s: float = 0.0  # what computing those again takes
    working_bytes: int = 0  # beyond what is kept, while its forward or backward runs
    block: bool = True  # recompute applies
    reductions: int = 4  # sums over tp of one boundary tensor, in forward and backward
    exchanges: int = 0  # all-to-alls over ep of one boundary tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Widths:
    """What the axes have to divide. 0: the model has no such thing."""

    hidden: int = 0
    heads: int = 0
    kv_heads: int = 0
    feed_forward: int = 0
    vocabulary: int = 0
    sequence: int = 0
    experts: int = 0

    def heads_problem(self, tp: int, cp: int) -> str:
        """Why cp ranks cannot divide the heads that a rank of tp has; "" where they can, or none is known.

        Key and value heads are repeated where they are fewer than the ranks of cp.
        """
        heads, kv_heads = self.heads // tp, self.kv_heads // tp
        of = f" of each tp={tp}" if tp > 1 else ""
        if heads % cp:
            return f"{cp} ranks do not divide the {heads} heads{of}"
        if kv_heads and kv_heads % cp and cp % kv_heads:
            return (
                f"{cp} ranks neither divide the {kv_heads} key and value heads{of} nor are a multiple of them"
            )
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The tensors of a model and the bytes that training keeps beside each trainable element.

    Without `layers` only data-parallel plans are known, without `widths` there is no tensor parallelism. The
    first layer is what comes before the blocks, the last what comes after.
    """

    tensors: tuple[TensorShape, ...]
    slots: int = 2  # optimizer tensors per parameter: 2 for Adam's moments
    slot_bytes: int = 4
    gradient_bytes: int | None = None  # None: as the parameter
    master_bytes: int = 0  # of a second, more precise copy that the optimizer keeps
    compute_bytes: int | None = None  # of an element in a gathered unit; None: as the parameter
    micro_size: int = 1  # samples per micro-batch
    activation_bytes_per_sample: int = 0  # at the peak of forward and backward; 0: unknown
    layers: tuple[Layer, ...] = ()
    widths: Widths | None = None
    boundary_bytes: int = 0  # of the tensor between two blocks, for one micro-batch
    chain: bool = True  # whether a pipeline can be cut between the layers
    positions: int = 0  # that tp divides outside of projections where it can; 0: the rules do not allow it
    sequence: int = 0  # positions that cp divides; 0: the rules do not say where they meet
    tied: bool = False  # the last layer uses a tensor of the first, so both hold it

    def divides_positions(self, tp: int, cp: int = 1) -> bool:
        """Whether tensor parallelism is to divide what is outside of projections, within a part of cp."""
        return tp > 1 and self.positions > 0 and self.positions % (tp * cp) == 0

    @property
    def parameters(self) -> int:
        return sum(t.numel for t in self.tensors if t.sharded or t.trainable)
