"""The middle of ratios that were measured in pairs, and how sure it is."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

UNSURE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Middle:
    """A median; with 95 % the true one lies between `low` and `high`, which are None for too few pairs."""

    median: float
    low: float | None
    high: float | None


def middle(values: Sequence[float]) -> Middle:
    """By order statistics (the sign test's interval): nothing is assumed of how the values are spread."""
    ordered, n = sorted(values), len(values)
    outside, tail = 0, 0.0
    while outside < n and 2 * (tail + math.comb(n, outside) / 2**n) <= UNSURE:
        tail += math.comb(n, outside) / 2**n
        outside += 1
    sure = outside > 0
    return Middle(
        median=statistics.median(ordered),
        low=ordered[outside - 1] if sure else None,
        high=ordered[n - outside] if sure else None,
    )
