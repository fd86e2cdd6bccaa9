"""Predicted time of a step: computing, waiting in the pipeline, and what goes over the links.

Times over links are latency plus bytes over bandwidth; a ring of n takes n - 1 messages per direction (Thakur
et al., 2005). The same formulas serve columns of meshes, which a search bounds from below, and one plan.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from elastic_train.planner.hardware import Fleet, Hardware
from elastic_train.planner.model_shape import ModelShape, TensorShape

Column = NDArray[np.float64]

MATRICES_S = 1 / 3
"""Share of a layer's seconds that the gradients of its matrices take: as much as its forward."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepWork:
    """What a rank of the slowest stage does, in columns of meshes (or of one)."""

    pp: Column
    dp_replicate: Column
    dp_shard: Column
    cp: Column
    inner: Column  # cp * tp: ranks that share a micro-batch within a stage
    virtual: Column
    split: Column  # 1 where backwards are split
    rounds: Column  # micro-batches that the slowest pipeline runs
    total: Column  # micro-batches that all pipelines run, fillers included
    slowest_s: Column  # of one micro-batch on the slowest pp index
    all_s: Column  # of one micro-batch through all stages
    gradient_bytes: Column  # of the largest stage, after tp, before dp_shard
    gathered_bytes: Column  # likewise, in compute precision
    units: Column  # gathered one after the other
    elements: Column  # that the optimizer updates


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Seconds of a step by what they are for."""

    compute: float  # the slowest stage over its micro-batches, tp's communication included
    bubble: float  # waiting while the pipeline fills and drains
    sends: float  # between stages
    gathers: float  # of dp_shard, what backward does not hide
    reduction: float  # of gradients, likewise
    update: float  # the optimizer, and the vote

    @property
    def step_s(self) -> float:
        return self.compute + self.bubble + self.sends + self.gathers + self.reduction + self.update

    @property
    def bubble_share(self) -> float:
        return self.bubble / self.step_s if self.step_s else 0.0


def columns_of(shape: ModelShape, hardware: Hardware, fleet: Fleet, work: StepWork) -> dict[str, Column]:
    """The fields of Cost, as columns."""
    size = work.pp * work.dp_replicate * work.dp_shard * work.inner
    crowd = _crowd(hardware, fleet, size)
    inners = np.unique(work.inner)
    per_node = np.array([fleet.together(int(inner)) for inner in inners], float)
    together = per_node[np.searchsorted(inners, work.inner)]
    on_one = size <= (fleet.workers if len(fleet.sizes) == 1 else max(fleet.sizes))
    part = work.inner * work.dp_shard
    groups = np.clip(together / part, 1.0, None)  # shard groups that a node's link serves at a time
    apart = work.split * hardware.split_s * sum(_is_trained(t) for t in shape.tensors) / work.pp
    alone = work.rounds * (work.slowest_s + apart)
    waited = (work.all_s - work.slowest_s) * _waited(shape, work.split) / work.virtual
    compute = np.maximum(alone, _by_cores(hardware, fleet, work, apart))

    cut = work.dp_shard > 1  # then over cp, too, and else its ranks hold copies
    shard = np.where(cut, work.dp_shard * work.cp, 1.0)
    copies = work.dp_replicate * np.where(cut, 1.0, work.cp)
    tp = work.inner / work.cp
    within = on_one | (part <= together)
    one_gather = (shard - 1) * _seconds(
        hardware, within, work.gathered_bytes / np.maximum(work.units, 1) / shard, groups * tp
    )
    gathers = 2 * work.rounds * work.units * one_gather
    scatter = (shard - 1) * _seconds(hardware, within, work.gradient_bytes / shard, groups * tp)
    sums = (
        2
        * (copies - 1)
        * _seconds(
            hardware,
            on_one,
            work.gradient_bytes / shard / copies,
            np.minimum(together, tp * shard * work.pp),
        )
    )
    left = crowd * _not_hidden(gathers + scatter + sums, compute, hardware.overlap)
    first = sum(t.numel * t.item_bytes for t in shape.tensors if t.layer == 0) * shape.tied
    ends = np.where(work.pp > 1, 2 * hardware.between.seconds(first), 0.0) if first else 0.0
    neighbours = on_one | (part * work.pp <= together)
    # Each of the ranks that share a micro-batch sends the whole tensor to its like on the next stage.
    whole = np.full_like(part, shape.boundary_bytes)
    send = 2 * _seconds(hardware, neighbours, whole, np.minimum(together, part))
    slots = work.rounds * work.virtual + work.pp - 1
    vote = 2 * np.ceil(np.log2(np.maximum(size, 1))) * hardware.between.latency_s
    return {
        "compute": compute,
        "bubble": np.maximum(alone + waited, compute) - compute,
        "sends": crowd * (np.where(work.pp > 1, slots * send, 0.0) + ends),
        "gathers": left * gathers,
        "reduction": left * (scatter + sums),
        "update": crowd * work.elements * hardware.update_s + vote,
    }


def cost_of(shape: ModelShape, hardware: Hardware, fleet: Fleet, work: StepWork) -> Cost:
    """The cost of one plan: columns of one entry."""
    columns = columns_of(shape, hardware, fleet, work)
    return Cost(**{name: float(column[0]) for name, column in columns.items()})


def _not_hidden(moving: Column, compute: Column, overlap: float) -> Column:
    """Share of the seconds of moving that computing doesn't hide: it hides no more than it takes itself."""
    hidden = np.minimum(overlap * moving, compute)
    return 1.0 - np.divide(hidden, moving, out=np.zeros_like(moving), where=moving > 0)


def _waited(shape: ModelShape, split: Column) -> Column:
    """Share of the wait that is left: a split backward fills it with the gradients of matrices, twice.

    Of each other stage a stage waits for forward + backward under one forward, one backward, and for
    forward + backward to the input - gradients of matrices with zero bubble: Qi et al., ICLR 2024, table 2.
    """
    matrices = [t for t in shape.tensors if _is_matrix(t)]
    trained = sum(t.numel for t in matrices if t.trainable) / max(1, sum(t.numel for t in matrices))
    return 1.0 - 2.0 * MATRICES_S * trained * split


def _is_matrix(tensor: TensorShape) -> bool:
    return tensor.sharded and len(tensor.shape) > 1


def _is_trained(tensor: TensorShape) -> bool:
    return tensor.trainable and _is_matrix(tensor)


def _crowd(hardware: Hardware, fleet: Fleet, size: Column) -> Column:
    """How much slower a worker is because its node has fewer cores than its workers keep busy."""
    if hardware.cores is None:
        return np.ones_like(size)
    return np.maximum(1.0, _beside(hardware, fleet, size) * hardware.cores_per_worker / hardware.cores)


def _by_cores(hardware: Hardware, fleet: Fleet, work: StepWork, apart: Column) -> Column:
    """Seconds that the cores of the fullest node need for what its workers compute.

    A stage that waits leaves its cores to the others, so this is not their time one by one.
    """
    if hardware.cores is None:
        return np.zeros_like(work.pp)
    size = work.pp * work.dp_replicate * work.dp_shard * work.inner
    share = _beside(hardware, fleet, size) / size
    seconds = work.total * (work.all_s + work.pp * apart) * work.inner
    return share * seconds * hardware.cores_per_worker / hardware.cores


def _beside(hardware: Hardware, fleet: Fleet, size: Column) -> Column:
    """Ranks on the fullest node, or on the machine that all nodes are parts of."""
    fullest = np.minimum(np.ceil(size / len(fleet.sizes)), max(fleet.sizes))
    return size if hardware.one_machine else fullest


def _seconds(hardware: Hardware, within: NDArray[np.bool_], nbytes: Column, sharing: Column) -> Column:
    """One message of each of `sharing` ranks of a node: within it, or over the node's one link."""
    inside = hardware.inside.latency_s + nbytes / hardware.inside.bytes_per_s
    between = hardware.between.latency_s + nbytes * np.maximum(sharing, 1) / hardware.between.bytes_per_s
    return np.where(within, inside, between)
