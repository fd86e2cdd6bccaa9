"""Forecast when a run will finish: an expected time and a range, from its own history."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elastic_train.observe.run_summary import RunSummary

SURE = 1.64
"""Standard deviations of a count of interruptions: 95 % of Poisson counts are below."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Seconds from the newest record on. `earliest` has no interruption any more, `latest` as many more as
    the number of those so far may be off by.
    """

    earliest: float
    expected: float
    latest: float


def forecast(told: RunSummary, max_steps: int) -> Forecast | None:
    """None for a run that ended, or that has not trained yet."""
    progress, account = told.progress, told.account.told()
    left = max_steps - progress.step
    step_s = recent_step_s(told)
    if progress.ended is not None or step_s is None or left < 0:
        return None
    idle = {cause: spent for cause, spent in account.badput if cause not in ("start", "not running")}
    overhead = sum(idle.values()) / account.good_s if account.good_s > 0 else 0.0
    many = told.figures.interruptions + 1
    pure = left * step_s
    return Forecast(
        earliest=pure,
        expected=pure * (1 + overhead),
        latest=pure * (1 + overhead * (1 + SURE / math.sqrt(many))),
    )


def recent_step_s(told: RunSummary) -> float | None:
    """The mean seconds of the newest steps of this group, else of all steps."""
    recent = [seconds for _, seconds in told.progress.speeds]
    if recent:
        return sum(recent) / len(recent)
    times = told.figures.step_times
    return times.total / times.count if times.count else None
