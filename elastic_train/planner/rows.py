"""Cost of each layer on a rank: bytes, FLOPs and communication under given axes, as columns.

Activation bytes follow Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models"
(MLSys 2023), section 4: tp divides them because the sequence is cut outside the tensor-parallel parts, and
full recomputation keeps the input of each block only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from elastic_train.planner.hardware import Link
from elastic_train.planner.model_shape import ModelShape
from elastic_train.planner.plan import Mesh, Recompute

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """Bytes of each layer on the worker that holds most of it, one entry per layer."""

    weights: Floats
    optimizer: Floats
    master: Floats
    gradients: Floats  # the shard's
    whole_gradients: Floats  # of all shards
    gathered: Floats  # a copy in compute precision, whole; 0 where computing needs none
    trainable: Floats  # elements of the shard
    block: NDArray[np.bool_]

    @property
    def state(self) -> Floats:
        return self.weights + self.optimizer + self.master


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tensors:
    """The tensors of a shape as columns, for all cuts; `sizes` padded with 1."""

    shape: ModelShape
    sizes: NDArray[np.int64]
    layer: NDArray[np.int64]
    item: Floats
    gradient: Floats
    compute: Floats
    trained: NDArray[np.bool_]
    sharded: NDArray[np.bool_]
    cut: NDArray[np.bool_]
    expert: NDArray[np.bool_]
    tp_dim: NDArray[np.int64]  # -1: none


def tensors_of(shape: ModelShape) -> Tensors:
    wide = max((len(t.shape) for t in shape.tensors), default=1) or 1
    item = np.array([t.item_bytes for t in shape.tensors], float)
    trained = np.array([t.trainable for t in shape.tensors])
    gradient = item if shape.gradient_bytes is None else np.full(len(item), float(shape.gradient_bytes))
    compute = item if shape.compute_bytes is None else np.full(len(item), float(shape.compute_bytes))
    return Tensors(
        shape=shape,
        sizes=np.array([(*t.shape, *[1] * (wide - len(t.shape))) for t in shape.tensors], np.int64),
        layer=np.array([t.layer for t in shape.tensors], np.int64),
        item=item,
        gradient=np.where(trained, gradient, 0.0),
        compute=compute,
        trained=trained,
        sharded=np.array([t.sharded for t in shape.tensors]),
        cut=np.array([t.sharded and bool(t.shape) for t in shape.tensors]),
        expert=np.array([t.expert for t in shape.tensors]),
        tp_dim=np.array([-1 if t.tp_dim is None else t.tp_dim for t in shape.tensors], np.int64),
    )


def rows(table: Tensors, mesh: Mesh) -> Rows:
    """The columns under the mesh's tp, ep and shards; its other axes don't change them."""
    shape, shard = table.shape, mesh.shards
    n = len(shape.layers)
    sizes = table.sizes.copy()
    tp, ep = table.tp_dim >= 0, table.expert
    sizes[tp, table.tp_dim[tp]] = -(-sizes[tp, table.tp_dim[tp]] // mesh.tp)
    sizes[ep, 0] = -(-sizes[ep, 0] // mesh.ep)
    shards = np.where(ep, -(-shard // mesh.ep), shard)  # ep is a part of dp_shard
    sizes[table.cut, 0] = -(-sizes[table.cut, 0] // shards[table.cut])
    numel: Floats = sizes.prod(axis=1).astype(np.float64)
    whole: Floats = np.where(table.cut, numel * shards, numel)
    item, gradient, compute = table.item, table.gradient, table.compute
    copied = table.cut if shard > 1 else table.sharded & (compute != item)

    def by_layer(values: Floats) -> Floats:
        sums = np.bincount(table.layer, weights=values, minlength=n).astype(float)
        if shape.tied and mesh.pp > 1:  # the last layer has its own copy of the first layer's tensor
            sums[-1] += sums[0]
        return sums

    trainable = by_layer(np.where(table.trained, numel, 0.0))
    return Rows(
        weights=by_layer(numel * item),
        optimizer=trainable * shape.slots * shape.slot_bytes,
        master=trainable * shape.master_bytes,
        gradients=by_layer(numel * gradient),
        whole_gradients=by_layer(whole * gradient),
        gathered=by_layer(np.where(copied, whole * compute, 0.0)),
        trainable=trainable,
        block=np.array([row.block for row in shape.layers]),
    )


def activations(shape: ModelShape, mesh: Mesh, recompute: Recompute) -> Floats:
    """Bytes that each layer keeps of one micro-batch from its forward to its backward.

    Under tp what goes into the projections is whole on every rank, gathered or never divided: a boundary
    tensor for each two sums. Where positions are not divided, what norms get is whole too.
    """
    kept = np.array([row.activation_bytes for row in shape.layers], float)
    block = np.array([row.block for row in shape.layers])
    if recompute == "selective":
        kept -= np.where(block, [row.dropped_bytes for row in shape.layers], 0)
    elif recompute == "full":
        kept = np.where(block, np.minimum(kept, shape.boundary_bytes), kept)
    if mesh.tp == 1:
        return kept / mesh.block_size
    spread = shape.divides_positions(mesh.tp, mesh.cp)
    sums = np.array([row.reductions for row in shape.layers], float)
    copies = np.where(block & spread, sums / 2, sums)
    whole = np.minimum(copies * shape.boundary_bytes, kept)
    if recompute == "full":
        whole = np.where(block, 0.0 if spread else kept, whole)
    return (whole + (kept - whole) / mesh.tp) / mesh.cp


def working(shape: ModelShape, mesh: Mesh) -> Floats:
    """Bytes that each layer needs beyond what it keeps, while its forward or backward runs.

    Under tp a whole boundary tensor that is yet to be summed, and one that was gathered for it.
    """
    needed = np.array([row.working_bytes for row in shape.layers], float)
    if mesh.tp > 1:
        sums = np.array([row.reductions > 0 for row in shape.layers])
        needed = needed / mesh.tp + 2 * (1 - 1 / mesh.tp) * shape.boundary_bytes * sums
    return needed / mesh.cp


def seconds(shape: ModelShape, mesh: Mesh, recompute: Recompute, inside: Link) -> tuple[Floats, Floats]:
    """(computing, communicating within tp, cp and ep) of each layer for one micro-batch.

    tp moves 8 (t - 1) / t of a boundary tensor per block (section 4.2.2 there): 4 sums of 2 (t - 1) / t. cp
    exchanges queries, keys, values and what attention gives, in forward and backward; heads of keys and
    values are repeated where they are fewer than the ranks.
    """
    each = np.array([row.seconds for row in shape.layers], float)
    block = np.array([row.block for row in shape.layers])
    if recompute == "selective":
        each += np.where(block, [row.dropped_s for row in shape.layers], 0.0)
    elif recompute == "full":
        each = np.where(block, each * 4 / 3, each)
    sums = np.array([row.reductions for row in shape.layers], float)
    exchanges = np.array([row.exchanges for row in shape.layers], float)
    passes = np.where(block, 3.0 if recompute == "full" else 2.0, 2.0)
    sums, exchanges = sums * passes / 2, exchanges * passes / 2
    nbytes = shape.boundary_bytes / mesh.cp
    moved = np.zeros(len(each))
    if mesh.tp > 1:
        moved += sums * 2 * (mesh.tp - 1) * inside.seconds(nbytes / mesh.tp)
    if mesh.cp > 1:
        part = nbytes / mesh.tp / mesh.cp
        one_of_each = 2 * (inside.seconds(part) + inside.seconds(part * _share_of_keys(shape, mesh)))
        moved += np.where(block, passes * (mesh.cp - 1) * one_of_each, 0.0)
    if mesh.ep > 1:
        moved += exchanges * (mesh.ep - 1) * inside.seconds(nbytes / mesh.tp / mesh.ep)
    return each / mesh.block_size, moved


def _share_of_keys(shape: ModelShape, mesh: Mesh) -> float:
    """Bytes of keys per byte of queries in an exchange over cp."""
    widths = shape.widths
    if widths is None or not widths.heads or not widths.kv_heads:
        return 1.0
    return max(widths.kv_heads, mesh.tp * mesh.cp) / widths.heads
