"""Keep what a rank has of a step that breaks before its vote, and go on with it in the next group.

Only where every rank holds the whole model, its gradient is a plain sum over its own micro-batches: what the
survivors have of it needs nobody else. The sums of the next group are of the same gradients in another order,
so the step ends within rounding of an undisturbed one, and with its bits where each rank goes on with its own
share.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from elastic_train.errors import GroupBroken
from elastic_train.train.state.kept_gradients import KeptGradients
from elastic_train.train.state.shards import Shards
from elastic_train.train.step.changing_buffers import ChangingBuffers
from elastic_train.train.step.gradient_sums import GradientSums
from elastic_train.train.step.micro_batch_work import Tally, Work
from elastic_train.train.step.training_metrics import TrainingMetrics


class BrokenStep:
    """Of one generation's shards. Unless it is `on`, nothing is kept, and what was kept is left out."""

    def __init__(
        self,
        shards: Shards,
        sums: GradientSums,
        buffers: ChangingBuffers,
        measured: TrainingMetrics | None,
        *,
        on: bool,
    ) -> None:
        self.on = on
        self._shards, self._sums, self._buffers, self._measured = shards, sums, buffers, measured
        self._stands: KeptGradients | None = None  # without its gradients, which still grow
        self._torn = False  # a backward has begun, and not ended

    def begin(self, step: int) -> Tally:
        """What is there of a step already: gradients where they grow, the rest as sums to go on with."""
        kept, self._shards.kept = self._shards.kept, None
        self._stands, self._torn = None, False
        if self._measured is not None:
            self._measured.begin()
        self._buffers.begin()
        if kept is None or kept.step != step or not self.on:
            return Tally()
        for fqn, gradient in kept.gradients.items():
            self._shards.parameters[fqn].grad = gradient
        if self._measured is not None:
            self._measured.begin(kept.measured)
        self._buffers.begin(kept.rows)
        self._stands = kept
        return Tally(loss=kept.loss, count=kept.count, ids=list(kept.ids))

    @contextmanager
    def backward(self, job: Work, tally: Tally) -> Iterator[None]:
        """Around a backward that adds to the gradients: half of one is nobody's."""
        self._torn = True
        yield
        self._torn = False
        if not self.on or job.filler:
            return
        before = self._stands.micro_batches if self._stands is not None else ()
        done = (*before, job.micro_batch.index)
        self._stands = KeptGradients(
            step=job.micro_batch.step,
            micro_batches=done,
            gradients={},
            loss=tally.loss,
            count=tally.count,
            ids=tuple(tally.ids),
            measured=dict(self._measured.sums) if self._measured is not None else {},
            rows={index: row for index, row in self._buffers.rows.items() if index in done},
        )

    def edited(self) -> None:
        """Gradients are changed from here on. Where no sum stands beside this rank's own, those are gone."""
        if self._sums.over_data is None:
            self._stands = None

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Around all of a step up to its vote."""
        try:
            yield
        except GroupBroken:
            self._keep()
            raise
        self._stands = None
        self._sums.forget_own()

    def _keep(self) -> None:
        stands, shards = self._stands, self._shards
        if stands is None or self._torn or not shards.step or not shards.proved:
            return  # before the first step the model is rehearsed, which needs all of its memory
        shards.kept = KeptGradients(
            step=stands.step,
            micro_batches=stands.micro_batches,
            gradients=self._sums.own(),
            loss=stands.loss,
            count=stands.count,
            ids=stands.ids,
            measured=stands.measured,
            rows=stands.rows,
        )
