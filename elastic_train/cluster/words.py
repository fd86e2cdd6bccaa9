"""What a member reports, as the events that the controller hears."""

from __future__ import annotations

from elastic_train.control.events import StepCommitted
from elastic_train.train.loop import StepReport


def committed(report: StepReport) -> StepCommitted:
    """Every rank has the same numbers."""
    return StepCommitted(
        at=0.0,
        generation=report.generation,
        step=report.step,
        loss=report.loss,
        tokens=report.tokens,
        grad_norm=report.grad_norm,
        skipped=report.skipped,
        seconds=report.seconds,
        vote=report.vote.values,
        metrics=report.metrics,
        ids_digest=report.ids_digest,
        last=report.last,
    )
