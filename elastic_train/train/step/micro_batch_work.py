"""Micro-batches of a rank in a step: assigned, in flight, and their sums for the vote."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from elastic_train.data.order import MicroBatch
from elastic_train.train.model.rng import Draws
from elastic_train.train.step.split_backward import Postponed


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One forward and backward. A filler repeats a micro-batch that another round or rank counts."""

    micro_batch: MicroBatch
    filler: bool


@dataclass(slots=True, kw_only=True, eq=False)
class Flight:
    """A micro-batch between its forward and its backward. `output` is the loss on the last stage."""

    job: Work
    draws: Draws
    received: torch.Tensor | None
    output: torch.Tensor
    postponed: Postponed | None = None  # gradients that its backward left to do


@dataclass(slots=True, kw_only=True, eq=False)
class Tally:
    """Sums over a rank's forwards of a step, fillers left out, in their order."""

    loss: torch.Tensor | float = 0.0
    count: float = 0.0
    ids: list[int] = field(default_factory=list[int])

    def add(self, loss: torch.Tensor, count: float, micro_batch: MicroBatch) -> None:
        self.loss = self.loss + loss.detach().double()
        self.count += count
        self.ids += micro_batch.ids
