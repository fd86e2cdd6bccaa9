"""Where values are on an axis, which of them it names, and numbers in words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0
TICKS = (
    1,
    2,
    5,
    10,
    15,
    30,
    60,
    120,
    300,
    600,
    900,
    1800,
    3600,
    7200,
    10800,
    21600,
    43200,
    DAY,
    2 * DAY,
    7 * DAY,
)
UNITS = ((DAY, "d", HOUR, "h"), (HOUR, "h", MINUTE, "min"), (MINUTE, "min", 1.0, "s"))


@dataclass(frozen=True, slots=True)
class Scale:
    """From values between `low` and `high` to shares of an axis."""

    low: float
    high: float

    def __call__(self, value: float) -> float:
        """0 to 1; values outside are at the end."""
        span = self.high - self.low
        return min(1.0, max(0.0, (value - self.low) / span)) if span > 0 else 0.5

    def percent(self, value: float) -> float:
        return round(100 * self(value), 3)


def fitted(values: Sequence[float], *, zero: bool = False) -> Scale:
    """A scale for values with their outliers at its ends: the lowest and highest 0.5 % of many."""
    found = sorted(values)
    if not found:
        return Scale(0.0, 1.0)
    cut = len(found) // 200
    low, high = found[cut], found[-1 - cut]
    low = min(0.0, low) if zero else low
    room = (high - low) * 0.06 or abs(high) * 0.06 or 1.0
    return Scale(low if zero else low - room, high + room)


def ticks(scale: Scale, most: int = 4) -> list[float]:
    """Round values on an axis, ascending."""
    span = scale.high - scale.low
    if span <= 0:
        return [scale.low]
    rough = span / most
    size = 10.0 ** math.floor(math.log10(rough))
    step = next((m * size for m in (1, 2, 2.5, 5, 10) if m * size >= rough), 10 * size)
    first = math.ceil(scale.low / step)
    return [n * step for n in range(first, math.floor(scale.high / step) + 1)]


def time_ticks(seconds: float, most: int = 8) -> list[float]:
    """Round durations from 0 up to some seconds."""
    step = next(
        (t for t in TICKS if seconds / t <= most), max(7 * DAY, 7 * DAY * math.ceil(seconds / 7 / DAY / most))
    )
    return [n * step for n in range(int(seconds / step) + 1)]


def duration(seconds: float) -> str:
    """Seconds in at most two units: `0.05 s`, `1.3 s`, `4 min 10 s`, `2 d 3 h`."""
    if seconds < 0:
        return f"-{duration(-seconds)}"
    if seconds < 1:
        return f"{round(seconds, 2):g} s"
    if seconds < 10:
        return f"{seconds:.1f} s" if seconds % 1 else f"{seconds:.0f} s"
    if seconds < MINUTE:
        return f"{seconds:.0f} s"
    for size, unit, below, lesser in UNITS:
        whole, rest = divmod(round(seconds / below), round(size / below))
        if whole:
            return f"{whole} {unit}" + (f" {rest} {lesser}" if rest else "")
    raise AssertionError(seconds)


def number(value: float) -> str:
    """Four digits, and a unit for what is large: `12.34k`."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 10_000:
        return f"{value:.0f}"
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):.4g}{unit}"
    return f"{value:.4g}"


def size(value: float) -> str:
    """Bytes."""
    for unit, limit in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= limit:
            return f"{value / limit:.3g} {unit}"
    return f"{value:.0f} B"


def clock(seconds: float, *, date: bool = False) -> str:
    """A time of day, UTC, from seconds since the epoch."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S" if date else "%H:%M:%S")
