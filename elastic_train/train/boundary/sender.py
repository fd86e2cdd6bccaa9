"""What a stage gives to its log as it sends: each tensor by the micro-batch that it belongs to."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from elastic_train.train.boundary.crossing import Crossing
from elastic_train.train.boundary.log import BoundaryLog


class Sender:
    """One step's. Activations are sent in the order of `micro_batches`, gradients too. No log, no effect."""

    def __init__(
        self, log: BoundaryLog | None, *, step: int, stage: int, micro_batches: Sequence[int]
    ) -> None:
        self.step, self.micro_batches = step, tuple(micro_batches)
        self._log, self._step, self._stage = log, step, stage
        self._activations, self._gradients = iter(micro_batches), iter(micro_batches)

    def activation(self, tensor: torch.Tensor) -> None:
        if self._log is not None:
            crossing = Crossing(
                step=self._step,
                kind="activation",
                source=self._stage,
                target=self._stage + 1,
                micro_batch=next(self._activations),
            )
            self._log.keep(crossing, tensor)

    def gradient(self, tensor: torch.Tensor) -> None:
        if self._log is not None:
            crossing = Crossing(
                step=self._step,
                kind="gradient",
                source=self._stage,
                target=self._stage - 1,
                micro_batch=next(self._gradients),
            )
            self._log.keep(crossing, tensor)

    def tie(self, fqn: str, target: int, tensor: torch.Tensor) -> None:
        """A copy: the sum of the stages takes the gradient's place."""
        if self._log is not None:
            crossing = Crossing(step=self._step, kind="tie", source=self._stage, target=target, name=fqn)
            self._log.keep(crossing, tensor.clone())
