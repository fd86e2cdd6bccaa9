"""Convert what a member reports into control events."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from elastic_train.control.events import StepCommitted

if TYPE_CHECKING:  # the controller loads no torch
    from elastic_train.train.step.training_loop import StepReport


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
        rates=report.rates,
        last=report.last,
    )


def each_once(reports: Iterable[StepCommitted]) -> tuple[StepCommitted, ...]:
    """Each step once, oldest first, as the report with its metrics has it."""
    known: dict[tuple[int, int], StepCommitted] = {}
    for report in reports:
        before = known.setdefault((report.generation, report.step), report)
        if len(report.metrics) > len(before.metrics) or report.last:
            known[report.generation, report.step] = report
    return tuple(known[key] for key in sorted(known))
