"""What a rank computed of a step whose group broke before its vote: the next group runs the rest alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeptGradients:
    """The sum of this rank's own gradients over whole `micro_batches` of `step`, by index, before any ranks
    were summed. They are at the state of the step before.

    `gradients` are by fqn, of a loss that is divided by the nominal count and scaled as it was; `loss` and
    `count` are sums, `ids` the samples. `measured` are the task's own metrics, as sums and counts; `rows` the
    statistics that normalisation layers saw, by micro-batch.
    """

    step: int
    micro_batches: tuple[int, ...]
    gradients: Mapping[str, torch.Tensor]
    loss: torch.Tensor | float
    count: float
    ids: tuple[int, ...]
    measured: Mapping[str, tuple[float, float]]
    rows: Mapping[int, torch.Tensor]
