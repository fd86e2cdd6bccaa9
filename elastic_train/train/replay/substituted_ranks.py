"""Set up a member that replays a lost stage: its process group and its part of the result."""

from __future__ import annotations

from elastic_train.config import RunSpec
from elastic_train.train.boundary.boundary_log import BoundaryLog
from elastic_train.train.boundary.logged_edges import SubstitutedRanks
from elastic_train.train.collectives.process_group import Group
from elastic_train.train.model.build import draw
from elastic_train.train.parallel.pipeline_stages import stages_of
from elastic_train.train.rank_assignment import ReplayAssignment
from elastic_train.train.state.carried_logs import opened
from elastic_train.train.state.shards import Shards
from elastic_train.train.task import Task


def replaying_group(assignment: ReplayAssignment, device: str, form_timeout_s: float) -> Group:
    """Those that replay the same stages, and nobody else; not formed yet."""
    size = len(assignment.substitute.ranks)
    if size == 1:
        return Group.alone(assignment.during, device)
    return Group(
        generation=assignment.during,
        rank=assignment.number,
        world_size=size,
        store_host=assignment.store_host,
        store_port=assignment.store_port,
        address=assignment.address,
        device=device,
        form_timeout_s=form_timeout_s,
        meeting=f"/replay/{assignment.substitute.stages[0]}",
    )


def substituted_ranks(assignment: ReplayAssignment, task: Task, spec: RunSpec) -> SubstitutedRanks:
    """Tensors of stages that are not lost are hidden: their survivors give them."""
    lost = assignment.substitute.lost
    mine = {lost.mesh.coordinate(rank)["pp"] for rank in assignment.ranks}
    hidden: frozenset[str] = frozenset()
    if len(mine) < assignment.substitute.stages[1] - assignment.substitute.stages[0]:
        blueprint = draw(task, spec.precision, spec.batch.seed)
        placed = stages_of(blueprint, task.parallelize(), lost.stages)
        hidden = frozenset(fqn for fqn, stages in placed.items() if not mine & set(stages))
    return SubstitutedRanks(substitute=assignment.substitute, ranks=assignment.ranks, hidden=hidden)


def opened_substitute(shards: Shards, spec: RunSpec) -> BoundaryLog | None:
    """What the lost rank had logged is logged again, so that its neighbours can be replayed next.

    Not for several stages that run as one: what crosses between them is nobody's to send.
    """
    assert shards.substituted is not None
    first, stop = shards.substituted.substitute.stages
    return opened(spec, shards.substituted.substitute.lost) if stop - first == 1 else None
