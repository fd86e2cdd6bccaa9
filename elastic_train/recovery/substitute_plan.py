"""The plan under which idle workers replay lost stages.

With the ranks that the stage had the arithmetic is that of the steps themselves, to the bit. With more of
them, each a replica with micro-batches of its own, it is as in data parallelism: equal within rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from elastic_train.planner.plan import Mesh, Plan, even_shares


@dataclass(frozen=True, slots=True, kw_only=True)
class Substitute:
    """Ranks in the place of the lost `stages` (half-open) of `lost`. `ranks` of `plan` run them as one stage.

    Rank `ranks[i]` is computed by worker i of those that stand in.
    """

    lost: Plan
    stages: tuple[int, int]
    plan: Plan
    ranks: tuple[int, ...]

    @property
    def inner(self) -> int:
        """Ranks that hold a stage between them, without its replicas."""
        return len(self.ranks) // self.plan.mesh.dp_replicate

    @property
    def mesh(self) -> Mesh:
        """Of the workers that stand in, who are one stage."""
        return replace(self.plan.mesh, pp=1)

    def substituted_ranks(self, number: int) -> tuple[int, ...]:
        """The ranks of the lost plan, one a stage, whose parts worker `number` has; none for a spare one."""
        size = self.lost.mesh.size // self.lost.mesh.pp
        return tuple(stage * size + number for stage in range(*self.stages)) if number < size else ()


def substitute(
    lost: Plan, stages: tuple[int, int], workers: Sequence[str], *, exact: bool
) -> Substitute | None:
    """On as many of the `workers` as are of use; None where they are too few.

    `exact`: with as many replicas as the stage had, because parts of it that are left are put beside.
    """
    first, stop = stages
    mesh = lost.mesh
    inner = mesh.copy_size
    micro_batches = sum(map(len, lost.shares))
    replicas = mesh.dp_replicate if exact else min(len(workers) // inner, micro_batches // mesh.dp_shard)
    if replicas < 1 or len(workers) < replicas * inner:
        return None
    merged = (lost.stages[first][0], lost.stages[stop - 1][1])
    cut = replace(mesh, pp=mesh.pp - (stop - first) + 1, dp_replicate=replicas)
    size = replicas * inner
    ranks = tuple(range(first * size, (first + 1) * size))
    seated = dict(zip(ranks, workers, strict=False))
    names = tuple(seated.get(rank, "") for rank in range(cut.size))
    same = replicas == mesh.dp_replicate
    plan = replace(
        lost,
        mesh=cut,
        workers=names,
        nodes=names,
        shares=lost.shares if same else even_shares(micro_batches, cut.dp),
        stages=(*lost.stages[:first], merged, *lost.stages[stop:]),
        groups=(),
    )
    return Substitute(lost=lost, stages=stages, plan=plan, ranks=ranks)
