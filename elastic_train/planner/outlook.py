"""What a change costs and how long the quiet after it lasts: goodput of a plan.

With H the time until the next change and C what the change costs, a plan of throughput T is worth
E[(H - C)+] T (Duan et al., "Parcae", NSDI 2024, section 5, call the like liveput). With H exponential of mean
q that is q exp(-C / q) T.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """Expected quiet time and measured costs of a change, in seconds."""

    quiet_s: float = math.inf  # mean time until workers come or go
    form_s: float = 0.0  # forming a group, before any byte moves
    storage_bytes_per_s: float = math.inf  # reading state that no worker holds
    lost_s: float = 0.0  # work since the last save: lost with a worker whose part has no copy
    hysteresis: float = 0.05  # a change must promise this share more goodput than staying

    def goodput(self, step_s: float, cost_s: float) -> float:
        """Steps per second of the time until the next change."""
        return math.exp(-cost_s / self.quiet_s) / step_s
