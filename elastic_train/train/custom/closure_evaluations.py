"""The closure that an optimizer calls for the loss: of the global batch, and the same on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import nn

from elastic_train.train.step.vote import StepStatistics

Told = tuple[StepStatistics, StepStatistics]
"""Of this rank, and summed over all."""


class NotFinite(Exception):
    """What an optimizer computed is no number."""


class Passes(Protocol):
    def evaluate(self, names: set[str]) -> Told: ...


class Evaluations:
    """Each call runs `compute` anew, which leaves gradients. `told` is of the first one, or of the one that
    was not finite, which ends them by NotFinite."""

    def __init__(
        self,
        passes: Passes,
        names: set[str],
        parameters: Sequence[nn.Parameter],
        compute: Callable[[], object],
    ) -> None:
        self._passes, self._names, self._parameters, self._compute = passes, names, parameters, compute
        self.told: Told = StepStatistics(nonfinite=1.0), StepStatistics(nonfinite=1.0)
        self._called = False

    def __call__(self) -> torch.Tensor:
        for parameter in self._parameters:
            parameter.grad = None
        self._compute()
        own, agreed = self._passes.evaluate(self._names)
        if agreed.skipped or not self._called:
            self.told, self._called = (own, agreed), True
        if agreed.skipped:
            raise NotFinite
        first = self._parameters[0]
        return torch.tensor(agreed.mean_loss, dtype=first.dtype, device=first.device)
