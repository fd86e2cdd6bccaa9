"""Step statistics: the numbers that ranks sum in a step's vote."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStatistics:
    """One rank's numbers before the vote, their sums over all ranks after it; all of them float64.

    `squares` is of the summed gradient before any scaling, each element counted once; negative in a step that
    was completed without its vote. `ids` are digests of consumed sample ids, below 2^40 each. Flags count the
    ranks that raised them: `busy` where there is no room for a snapshot, `behind` where there is none for one
    that goes to storage.
    """

    squares: float = 0.0
    loss: float = 0.0
    count: float = 0.0
    nonfinite: float = 0.0
    pause: float = 0.0
    save: float = 0.0
    busy: float = 0.0
    behind: float = 0.0
    ids: float = 0.0

    def packed(self, device: torch.device) -> torch.Tensor:
        return torch.tensor(self.values, dtype=torch.float64, device=device)

    @property
    def values(self) -> tuple[float, ...]:
        return tuple(getattr(self, f.name) for f in fields(self))

    @classmethod
    def unpacked(cls, values: tuple[float, ...]) -> StepStatistics:
        return cls(**dict(zip((f.name for f in fields(cls)), values, strict=True)))

    @property
    def skipped(self) -> bool:
        """Whether the step changes nothing but the counters: its gradient is not finite, or is none."""
        return self.nonfinite > 0 or self.count <= 0

    @property
    def mean_loss(self) -> float:
        """Over what is counted; NaN where it isn't finite, as the sum leaves out what isn't."""
        return math.nan if self.skipped else self.loss / self.count
