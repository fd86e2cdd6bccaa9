"""Names of tensors that cross a stage boundary, and the source that a replay reads them from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from elastic_train.recovery.evidence import Vote

Kind = Literal["activation", "gradient", "tie"]


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Crossing:
    """One tensor that stage `source` sent to stage `target` in a step.

    Activations go down the pipeline and their gradients up, one of each per micro-batch; `name` tells several
    of them apart. A tie is the summed gradient that stages which share a parameter exchange, once per step:
    `name` is the parameter, `micro_batch` -1, `part` the place of the sender, who has a shard, in its stage.
    """

    step: int
    kind: Kind
    source: int
    target: int
    micro_batch: int = -1
    name: str = ""
    part: int = 0


class KeptCrossings(Protocol):
    """Where a replay reads what the lost stage received."""

    def read(self, crossing: Crossing) -> torch.Tensor:
        """The tensor that crossed. Raises KeyError where it is not kept."""
        ...

    def vote(self, step: int) -> Vote:
        """The outcome of a step's vote. Raises KeyError where it is not kept."""
        ...
