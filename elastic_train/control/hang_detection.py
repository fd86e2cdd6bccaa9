"""Hang detection: find from heartbeats whether a group stands still, and which rank holds it up.

A deadline is relative to the measured time of a step: a rank that is ten times slower makes slow steps, not a
hang. Phases whose length nobody knows beforehand, first steps and saves and evaluations, have the long one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from elastic_train.config import Timing

STALL_STEPS = 20.0
"""Step times that a member may spend in one phase of a step."""

ORDER: Mapping[str, int] = {
    "filling": -1,
    "forward": 0,
    "backward": 0,
    "update": 0,
    "reduce": 1,
    "gradients": 2,
    "vote": 3,
    "optimizer": 4,
    "compare": 5,
    "save": 5,
    "evaluation": 5,
}
"""How far a member is in its step. Forward, backward and updates in backward alternate."""

OPEN_ENDED = frozenset({"filling", "save", "compare", "evaluation", "gradients"})
COLLECTIVES = "torch/distributed/"
INNERMOST = 24
"""Lines of a stack, from the inside, in which a wait for other ranks shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Where a member is, and for how many seconds it has been there."""

    worker: str
    rank: int
    step: int
    phase: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """A group that stands still. `suspects` are furthest behind; `limit` is the deadline that passed."""

    suspects: tuple[Mark, ...]
    limit: float
    others: bool  # whether somebody is ahead of the suspects


def limit_of(phase: str, step_s: float, timing: Timing) -> float:
    """Seconds that a member may spend in a phase; `step_s` is 0 while no step of the group was measured."""
    if phase in OPEN_ENDED or step_s <= 0:
        return timing.progress_s
    return min(timing.progress_s, max(timing.stall_s, STALL_STEPS * step_s))


def stalled(marks: Iterable[Mark], step_s: float, timing: Timing) -> Stall | None:
    """Whether every member of a group has been where it is for too long. One that moves is no stall."""
    inside = [m for m in marks if m.phase in ORDER]
    if not inside:
        return None
    limits = [limit_of(m.phase, step_s, timing) for m in inside]
    if any(m.seconds <= limit for m, limit in zip(inside, limits, strict=True)):
        return None
    least = min((m.step, ORDER[m.phase]) for m in inside)
    behind = tuple(m for m in inside if (m.step, ORDER[m.phase]) == least)
    return Stall(suspects=behind, limit=max(limits), others=len(behind) < len(inside))


def culprit(stall: Stall, stacks: Mapping[str, str]) -> Mark | None:
    """The one suspect that holds up the group; None where no single one stands out.

    Suspects whose stack says that they wait for other ranks are cleared, if not all of them do. Who did not
    even answer is not cleared.
    """
    busy = [m for m in stall.suspects if not waits(stacks.get(m.worker, ""))]
    left = busy or (list(stall.suspects) if stall.others else [])
    return left[0] if len(left) == 1 else None


def waits(stack: str) -> bool:
    """Whether a stack, outermost frame first, ends in a wait for other ranks."""
    return any(COLLECTIVES in line for line in stack.splitlines()[-INNERMOST:])
