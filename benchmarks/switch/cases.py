"""The changes that the switch benchmark makes, and what both of its systems are given."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from elastic_train.config import Parallelism

GLOBAL_BATCH, MICRO_BATCH = 24, 2
BATCHES = {"medium": 8}  # of a size at which a step would take a minute
CHECKPOINT_EVERY = 10
LABELS = {"tiny": "200k", "small": "6m", "base": "85m", "medium": "368m"}  # parameters, by size
# Steps of a group before the next change, and seconds that a forward takes longer on a slow node, by size.
SETTLED = {"tiny": 15, "small": 10, "base": 6, "medium": 4}
SLOW_S = {"tiny": 0.05, "small": 0.4, "base": 1.0, "medium": 1.0}
NOTICE_S = 60.0  # a drain's
EVICT_SLOWER_THAN = 1.5
GIVE_UP_S = 240.0  # for one change
FREE = Parallelism()  # the planner's choice


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Nodes that are added and, of those that train, drained, and by how many workers the group changes."""

    name: str
    by: int
    adds: int = 0
    drains: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Changes of one run, in their order, which begins with `workers` nodes of one worker each that train and
    `spare` ones that stand by. Where a node is `slow`, it is from when the first group has settled.
    """

    workers: int
    changes: tuple[Change, ...]
    parallelism: Parallelism = FREE
    spare: int = 0
    slow: bool = False
    join_window_s: float = 0.5
    peers: Literal["auto"] | None = "auto"

    @property
    def sizes(self) -> tuple[int, ...]:
        """Workers that train at first and after each change."""
        return tuple(accumulate((change.by for change in self.changes), initial=self.workers))

    def turns(self, times: int) -> tuple[Change, ...]:
        """The changes so many times over where they lead back to the first group, else once."""
        return self.changes * (1 if self.sizes[-1] != self.workers else times)


CASES = {
    "dp": Case(
        workers=2,
        changes=(Change(name="growth", by=1, adds=1), Change(name="drain", by=-1, drains=1)),
    ),
    "alone": Case(  # of so few workers that a large state fits into one machine
        workers=1,
        changes=(Change(name="1 to 2", by=1, adds=1),),
        peers=None,
    ),
    "many": Case(
        workers=3,
        changes=(
            Change(name="3 to 4", by=1, adds=1),
            Change(name="4 to 6", by=2, adds=2),
            Change(name="6 to 3", by=-3, drains=3),
        ),
        join_window_s=3.0,  # two that are added come one after the other
    ),
    "fsdp": Case(
        workers=2,
        changes=(
            Change(name="dp to fsdp", by=2, adds=2),
            Change(name="fsdp to dp", by=-2, drains=2),
        ),
        parallelism=Parallelism(dp_replicate=2, tp=1, pp=1),
    ),
    "shards": Case(  # of a state that is nowhere whole
        workers=2,
        changes=(Change(name="shards 2 to 3", by=1, adds=1), Change(name="shards 3 to 2", by=-1, drains=1)),
        parallelism=Parallelism(dp_replicate=1, tp=1, pp=1),
        peers=None,
    ),
    "pp": Case(
        workers=1,
        changes=(Change(name="pp 1 to 2", by=1, adds=1), Change(name="pp 2 to 1", by=-1, drains=1)),
        parallelism=Parallelism(dp_replicate=1, dp_shard=1, tp=1),
    ),
    "migration": Case(
        workers=2,
        spare=1,
        changes=(Change(name="migration", by=0, adds=1, drains=1),),
    ),
    "eviction": Case(
        workers=3,
        slow=True,
        changes=(Change(name="eviction", by=-1),),
        join_window_s=60.0,  # the first group is whole: its steps are counted
    ),
}
