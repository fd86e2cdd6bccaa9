"""Quantiles of durations from a histogram of counts, with a relative error of 2 %.

The counts are by logarithm (C. Masson et al., DDSketch, VLDB 2019): as many as there are orders of magnitude,
whatever the number of values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

ERROR = 0.02
_BASE = math.log((1 + ERROR) / (1 - ERROR))
SHORTEST_S = 1e-6


@dataclass(slots=True, kw_only=True)
class Durations:
    """Seconds."""

    counts: dict[int, int] = field(default_factory=dict[int, int])
    count: int = 0
    total: float = 0.0

    def add(self, seconds: float) -> None:
        if not 0.0 <= seconds < math.inf:
            return
        key = math.ceil(math.log(max(seconds, SHORTEST_S)) / _BASE)
        self.counts[key] = self.counts.get(key, 0) + 1
        self.count += 1
        self.total += seconds

    def quantile(self, share: float) -> float | None:
        """The value that this share of all is not above; None where there is none."""
        left = share * (self.count - 1) if self.count else math.inf
        for key in sorted(self.counts):
            left -= self.counts[key]
            if left < 0:
                return 2.0 * math.exp(key * _BASE) / (math.exp(_BASE) + 1.0)
        return None
