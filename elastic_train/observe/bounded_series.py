"""A time series in bounded memory: neighbours are merged, their extremes stay."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

CAPACITY = 1024
"""Buckets. Half of them are left where neighbours are merged."""

Bucket = tuple[float, float, int, int, int, float, float, float]
"""First and last second, first and last step, how many values, their sum, the least and the largest."""


@dataclass(slots=True, kw_only=True)
class Series:
    """Finite values by wall seconds and step, in the order of time. Others are counted and left out."""

    width: int = 1  # values that a bucket is filled with
    buckets: list[Bucket] = field(default_factory=list[Bucket])
    left_out: int = 0

    def add(self, seconds: float, step: int, value: float) -> None:
        if not math.isfinite(value):
            self.left_out += 1
            return
        new: Bucket = (seconds, seconds, step, step, 1, value, value, value)
        if self.buckets and self.buckets[-1][4] < self.width and self.buckets[-1][3] <= step:  # in one go
            self.buckets[-1] = merged(self.buckets[-1], new)
            return
        self.buckets.append(new)
        if len(self.buckets) > CAPACITY:
            self.width *= 2
            pairs = [self.buckets[start : start + 2] for start in range(0, len(self.buckets), 2)]
            self.buckets = [merged(*pair) if len(pair) == 2 else pair[0] for pair in pairs]

    @property
    def last(self) -> float | None:
        """The mean of the newest bucket: the newest value while each has one of its own."""
        return self.buckets[-1][5] / self.buckets[-1][4] if self.buckets else None


def merged(a: Bucket, b: Bucket) -> Bucket:
    """Two buckets as one; `b` is the later one."""
    steps = min(a[2], b[2]), max(a[3], b[3])
    return (a[0], b[1], *steps, a[4] + b[4], a[5] + b[5], min(a[6], b[6]), max(a[7], b[7]))
