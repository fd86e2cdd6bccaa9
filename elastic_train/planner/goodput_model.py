"""Goodput of a plan: the cost of a switch against the time until the next one.

With H the time until the next change and C what the change costs, a plan of throughput T is worth
E[(H - C)+] T (Duan et al., "Parcae", NSDI 2024, section 5, call the like liveput). With H exponential of mean
q, cut off at the end of the run in L, that is q (exp(-C / q) - exp(-L / q)) T.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from elastic_train.planner.plan import Mesh, Recompute, Schedule

Floats = NDArray[np.float64]

LEAST_SHARE = 1e-9
"""Of the time, what is left at least: of changes that never pay the fastest plan is still first."""


def more(gain: float) -> str:
    """A share of goodput that a change gains, in words."""
    return f"{abs(gain):.1%} {'more' if gain >= 0 else 'less'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPace:
    """What a step took under a plan that the run was on."""

    mesh: Mesh
    schedule: Schedule
    recompute: Recompute
    step_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What the run expects and has measured: quiet times, costs of a change, in seconds, and paces."""

    quiet_s: float = math.inf  # mean time until workers come or go
    left_s: float = math.inf  # until the run is over, under the plan that is held
    form_s: float = 0.0  # forming a group, before any byte moves
    bytes_per_s: float | None = None  # that a worker was seen to receive; None: what its link is said to do
    storage_bytes_per_s: float = math.inf  # reading state that no worker holds
    lost_s: float = 0.0  # work since the last save: lost with a worker whose part has no copy
    hysteresis: float = 0.05  # a change must promise this share more goodput than staying
    paces: tuple[StepPace, ...] = ()

    def goodput(self, step_s: float, cost_s: float) -> float:
        """Steps per second of the time until the next change."""
        return float(self.share(np.array([cost_s]))[0]) / step_s

    def share(self, cost_s: Floats) -> Floats:
        """Of the time until the next change, what is left for steps after a change of so many seconds."""
        if math.isinf(self.quiet_s):
            left = 1.0 - cost_s / self.left_s
        else:
            rest = np.minimum(cost_s - self.left_s, 0.0)
            left = np.exp(-cost_s / self.quiet_s) * np.expm1(rest / self.quiet_s)
            left = left / math.expm1(-self.left_s / self.quiet_s)
        return np.maximum(left, LEAST_SHARE)

    def said(self, cost_s: float) -> str:
        """What a change is weighed against, in words."""
        quiet = "" if math.isinf(self.quiet_s) else f", one is expected every {self.quiet_s / 60:.3g} min"
        left = "" if math.isinf(self.left_s) else f", {self.left_s:.3g} s are left"
        return f"a change takes {cost_s:.2g} s{quiet}{left}"
