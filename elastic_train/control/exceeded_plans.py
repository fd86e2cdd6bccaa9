"""Plans that a device's memory turned out to be too small for: none that needs as much is chosen again."""

from __future__ import annotations

from collections.abc import Iterable

from elastic_train.control.causes import Cause
from elastic_train.planner.plan import Plan, bytes_text

Exceeded = tuple[tuple[Plan, int], ...]
"""Plans, and the bytes that tensors took at the most before the device had no more."""


def with_exceeded(known: Exceeded, plan: Plan, causes: Iterable[Cause]) -> Exceeded:
    """With a plan that ended by such causes; the same where it did not, or where its kind is known."""
    peak = max((cause.peak for cause in causes), default=0)
    if not peak or any(_kind(plan) == _kind(other) for other, _ in known):
        return known
    return (*known, (plan, peak))


def said(exceeded: Exceeded) -> str:
    """What a person should know of them."""
    each = (f"{plan.mesh} with {bytes_text(peak)}" for plan, peak in exceeded)
    return f"a device's memory was too small for {', '.join(each)}"


def _kind(plan: Plan) -> tuple[object, ...]:
    """What a worker's memory depends on."""
    return plan.mesh, plan.stages, plan.virtual, plan.recompute, plan.schedule
