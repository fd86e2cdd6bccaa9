"""Parallel axes of a plan, in one table: pipeline, replicated and sharded data, context, tensor, experts.

`Mesh`, `Parallelism` and `Candidates` have a field for each, `AxisLimits` for those of `MODEL`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Axis:
    """What its ranks divide among them: micro-batches, blocks of layers, or what is in a layer. A part of
    another axis has no ranks of its own.
    """

    divides: Literal["batch", "stages", "layers"]
    part_of: str = ""


AXES: Mapping[str, Axis] = {
    "pp": Axis("stages"),
    "dp_replicate": Axis("batch"),
    "dp_shard": Axis("batch"),
    "cp": Axis("layers"),
    "tp": Axis("layers"),
    "ep": Axis("layers", part_of="dp_shard"),
}
"""In rank order, the outermost first: rank = ((pp * R + dp_replicate) * S + dp_shard) ..."""

RANKED = tuple(name for name, axis in AXES.items() if not axis.part_of)
"""The factors of the number of ranks."""
BATCH = tuple(name for name, axis in AXES.items() if axis.divides == "batch")
LAYERS = tuple(name for name, axis in AXES.items() if axis.divides == "layers")
MODEL = tuple(name for name in AXES if name not in BATCH)
"""Those that cut computations, not only batches and memory."""
