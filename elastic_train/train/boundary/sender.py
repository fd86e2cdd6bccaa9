"""Log each tensor that a pipeline stage sends, by its micro-batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from elastic_train.train.boundary.boundary_log import BoundaryLog
from elastic_train.train.boundary.crossing import Crossing, Kind
from elastic_train.train.boundary.logged_edges import Edges

Sending = tuple[int, bool]
"""A micro-batch, and whether a filler computes it."""


class Sender:
    """One step's. Activations are sent in the order of `work`, gradients too. No log, no effect.

    What fillers send is not kept: they repeat what is kept elsewhere, and count for nothing.
    """

    def __init__(
        self, log: BoundaryLog | None, edges: Edges, *, step: int, work: Sequence[Sending] = ()
    ) -> None:
        self.step, self.edges, self.work = step, edges, tuple(work)
        self._log = log
        self._activations, self._gradients = iter(self.work), iter(self.work)
        self._tied = set[tuple[str, int]]()

    def activation(self, tensor: torch.Tensor) -> None:
        self._crossed("activation", self.edges.last, self.edges.last + 1, self._activations, tensor)

    def gradient(self, tensor: torch.Tensor) -> None:
        self._crossed("gradient", self.edges.first, self.edges.first - 1, self._gradients, tensor)

    def tie(self, fqn: str, target: int, tensor: torch.Tensor) -> None:
        """A copy: the sum of the stages takes the gradient's place. Once for all stages of a group."""
        target = self.edges.plan.group_of(target)[0]
        if self._log is not None and self.edges.logs(target) and (fqn, target) not in self._tied:
            self._tied.add((fqn, target))
            crossing = Crossing(
                step=self.step,
                kind="tie",
                source=self.edges.first,
                target=target,
                name=fqn,
                part=self.edges.part,
            )
            self._log.keep(crossing, tensor.clone())

    def _crossed(
        self, kind: Kind, source: int, target: int, sending: Iterator[Sending], tensor: torch.Tensor
    ) -> None:
        if self._log is None:
            return
        micro_batch, filler = next(sending)
        if not filler and self.edges.speaks and self.edges.logs(target):
            crossing = Crossing(
                step=self.step, kind=kind, source=source, target=target, micro_batch=micro_batch
            )
            self._log.keep(crossing, tensor)
