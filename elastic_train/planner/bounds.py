"""Bounds of every candidate from columns alone: the time of a step, and whether memory may do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elastic_train.axes import LAYERS
from elastic_train.planner.cost import StepWork, columns_of
from elastic_train.planner.hardware import Fleet, Hardware
from elastic_train.planner.mesh_candidates import RECOMPUTES, Candidate, Candidates
from elastic_train.planner.model_shape import ModelShape
from elastic_train.planner.plan import Mesh
from elastic_train.planner.stage_table import StageTable

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Totals:
    """Of the whole model, by what a candidate divides it with besides dp_shard and pp. Columns."""

    slowest_s: Floats  # of the best cut, memory apart
    all_s: Floats
    gradients: Floats
    gathered: Floats
    elements: Floats
    state_of_blocks: Floats
    gradients_of_blocks: Floats
    state_to_kept: Floats  # most bytes of state per byte that a block keeps of a micro-batch
    gradients_to_kept: Floats


def totals(found: Candidates, stages: StageTable) -> Totals:
    """The columns, worked out once per distinct combination."""
    divided = (*(getattr(found, axis) for axis in LAYERS), found.recompute)
    coded = divided[0]
    for column in divided[1:]:
        coded = coded * (int(column.max(initial=0)) + 1) + column
    _, first, index = np.unique(coded, return_index=True, return_inverse=True)
    columns = np.zeros((9, len(found)))
    for number, at in enumerate(first.tolist()):
        *sizes, kind = (int(column[at]) for column in divided)
        mine = index == number
        one = Candidate(
            mesh=Mesh(**dict(zip(LAYERS, sizes, strict=True))), virtual=1, recompute=RECOMPUTES[kind]
        )
        times, memory = stages.of(one), stages.memory(one, 1)
        pp, virtual = found.pp[mine], found.virtual[mine]
        slowest = np.array([times.slowest.of(n + 1) for n in range(int(pp.max()))])
        # Interleaved stages of a rank may balance out: then only the mean bounds them.
        columns[0, mine] = np.where(virtual > 1, times.whole / pp, slowest[pp - 1])
        table, block = memory.rows, memory.rows.block
        state, gradients, kept = table.state[block], table.gradients[block], memory.kept[block]
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios = [float(np.nan_to_num((part / kept).max(initial=0.0))) for part in (state, gradients)]
        values = (
            times.whole,
            table.gradients.sum(),
            memory.whole.sum(),
            table.trainable.sum(),
            state.sum(),
            gradients.sum(),
            *ratios,
        )
        columns[1:, mine] = np.array(values)[:, None]
    return Totals(**dict(zip(Totals.__slots__, columns, strict=True)))


def step_seconds(
    found: Candidates,
    known: Totals,
    shape: ModelShape,
    hardware: Hardware,
    fleet: Fleet,
    *,
    rounds: Floats,
    micro_batches: int,
) -> Floats:
    """Seconds of a step, at least: stages of equal bytes, the best cut in time."""
    work = StepWork(
        pp=found.pp.astype(float),
        dp_replicate=found.dp_replicate.astype(float),
        dp_shard=found.dp_shard.astype(float),
        cp=found.cp.astype(float),
        inner=(found.cp * found.tp).astype(float),
        virtual=found.virtual.astype(float),
        split=found.split.astype(float),
        rounds=rounds,
        total=total_rounds(found.dp_replicate, found.dp_shard, rounds, micro_batches),
        slowest_s=known.slowest_s,
        all_s=known.all_s,
        gradient_bytes=known.gradients / found.pp,
        gathered_bytes=known.gathered / found.pp,
        units=np.ones(len(found)),
        elements=known.elements / (found.pp * found.shards),
    )
    return np.stack(list(columns_of(shape, hardware, fleet, work).values())).sum(axis=0)


def total_rounds(
    dp_replicate: NDArray[Any], dp_shard: NDArray[Any], rounds: Floats, micro_batches: int
) -> Floats:
    """Micro-batches that all pipelines run: under dp_shard the shorter shares are filled up."""
    filled: Floats = np.maximum(dp_replicate * dp_shard * rounds, micro_batches)
    return np.where(dp_shard > 1, filled, float(micro_batches))


def may_fit(found: Candidates, known: Totals, memory_bytes: int) -> NDArray[np.bool_]:
    """False only where no cut of the blocks fits.

    With w bytes of weights and gradients and s bytes kept per byte of them, the stage at distance j from the
    last holds at most B / (w (1 + (j + 1) s)) of the blocks; an integral bounds the sum over j.
    """
    shards = found.shards
    gradient_shards = np.where((found.rounds > 1) & (shards > 1), 1, shards)
    weights = known.state_of_blocks / shards + known.gradients_of_blocks / gradient_shards
    inverse = known.state_to_kept / shards + known.gradients_to_kept / gradient_shards
    kept = np.where(np.isfinite(inverse) & (inverse > 0), 1.0 / np.where(inverse > 0, inverse, 1.0), 0.0)
    flying = np.where(kept > 0, np.log1p(found.pp * kept) / np.where(kept > 0, kept, 1.0), found.pp)
    return memory_bytes * flying >= weights
