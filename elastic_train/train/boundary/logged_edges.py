"""Which boundary tensors a rank logs, in the ranks of the logged plan."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_train.planner.plan import Plan
from elastic_train.recovery.substitute_plan import Substitute


@dataclass(frozen=True, slots=True, kw_only=True)
class SubstitutedRanks:
    """What shards stand in for: `ranks` of the lost plan, whose tensors but the `hidden` ones they give."""

    substitute: Substitute
    ranks: tuple[int, ...]
    hidden: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Edges:
    """Stages `first` to `last` of `plan`, run by one rank; `part` is its place among the ranks of a stage.

    Ranks that differ in tp or cp receive the same; the first of them `speaks`, and keeps what it sends.
    """

    plan: Plan
    first: int
    last: int
    part: int
    speaks: bool

    @classmethod
    def of(cls, plan: Plan, rank: int, substituted: SubstitutedRanks | None = None) -> Edges:
        at = plan.mesh.coordinate(rank)
        inner, block = plan.mesh.copy_size, plan.mesh.block_size
        first = last = at["pp"]
        if substituted is not None:
            first, stop = substituted.substitute.stages
            last, plan = stop - 1, substituted.substitute.lost
        return cls(plan=plan, first=first, last=last, part=rank % inner, speaks=rank % block == 0)

    def logs(self, target: int) -> bool:
        """Whether what goes to a stage is kept: it is in another group."""
        return self.plan.group_of(target) != self.plan.group_of(self.first)

    def stage_of(self, index: int) -> int:
        """A stage of the plan under which these run, by its number in the plan that is logged."""
        return index if index <= self.first else index + self.last - self.first

    def __contains__(self, stage: int) -> bool:
        return self.first <= stage <= self.last
