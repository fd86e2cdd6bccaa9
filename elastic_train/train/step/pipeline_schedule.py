"""Pipeline schedules: the order of forwards and backwards on a stage."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from elastic_train.planner.plan import Schedule

Pass = tuple[Literal["forward", "backward", "weights"], int]
"""What to run, and of which job. "weights" are the gradients that a split backward leaves to do."""


def passes_of(schedule: Schedule, jobs: int, *, stage: int, stages: int) -> Iterator[Pass]:
    """What a stage does, in order. Gradients are complete by ascending job on every stage."""
    if schedule == "ZeroBubble":
        return zero_bubble(jobs, stage=stage, stages=stages)
    return one_forward_one_backward(jobs, stage=stage, stages=stages)


def one_forward_one_backward(jobs: int, *, stage: int, stages: int) -> Iterator[Pass]:
    """Narayanan et al., PipeDream, SOSP 2019, section 3.2."""
    ahead = min(jobs, stages - 1 - stage)
    for job in range(ahead):
        yield "forward", job
    for job in range(ahead, jobs):
        yield "forward", job
        yield "backward", job - ahead
    for job in range(jobs - ahead, jobs):
        yield "backward", job


def zero_bubble(jobs: int, *, stage: int, stages: int) -> Iterator[Pass]:
    """ZB-H1 of Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024, section 2.1.

    A backward of stage s is for the stage before only; the gradients of its own weights follow s jobs later,
    where the stage would wait otherwise. Every stage keeps as many micro-batches as the first one does under
    one forward, one backward.
    """
    ahead, behind = min(jobs, stages - 1 - stage), min(jobs, stage)
    for job in range(ahead):
        yield "forward", job
    for job in range(jobs):
        if job + ahead < jobs:
            yield "forward", job + ahead
        yield "backward", job
        if job >= behind:
            yield "weights", job - behind
    for job in range(jobs - behind, jobs):
        yield "weights", job
