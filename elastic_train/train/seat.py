"""A member's place in a generation, and where it is in its work."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_train.planner.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """A place in a generation. `address` is this node's IP, which gloo binds to."""

    generation: int
    rank: int
    plan: Plan
    store_host: str
    store_port: int
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a member is; `since` is the monotonic time at which it entered the phase."""

    generation: int
    rank: int
    step: int
    phase: str
    micro_batch: int
    since: float
