"""Rank assignment of a member in a generation, and its progress."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_train.planner.plan import Plan
from elastic_train.recovery.substitute_plan import Substitute


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAssignment:
    """A place in a generation, which starts from `step`. `address` is this node's IP, which gloo binds to.

    `by_module` says how the run's initial values were given before, if they were: it gives the same again.
    `prepared` is the number of the preparation that this is, or that made the group ready; 0 where none did.
    """

    generation: int
    rank: int
    plan: Plan
    store_host: str
    store_port: int
    address: str
    step: int = 0
    by_module: bool | None = None
    prepared: int = 0

    @property
    def meeting(self) -> tuple[int, int]:
        """What tells its group apart from any other of the run."""
        return self.generation, self.prepared


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayAssignment:
    """A place among those that run lost stages of `generation` again while generation `during` forms.

    `ranks` are those of the lost plan that this worker brings back, none where it only helps.
    """

    generation: int
    during: int
    substitute: Substitute
    number: int
    ranks: tuple[int, ...]
    store_host: str = ""
    store_port: int = 0
    address: str = ""
    by_module: bool | None = None  # as of a RankAssignment

    @property
    def rank(self) -> int:
        return self.substitute.ranks[self.number]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerProgress:
    """Where a member is; `since` is the monotonic time at which it entered the phase.

    While it takes a rank, `filled_bytes` of the `needed_bytes` of its new state have come.
    """

    generation: int
    rank: int
    step: int
    phase: str
    micro_batch: int
    since: float
    filled_bytes: int = 0
    needed_bytes: int = 0
