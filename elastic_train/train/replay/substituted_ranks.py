"""Where a member runs lost stages again: its group, and what of the outcome is its to give."""

from __future__ import annotations

from elastic_train.config import RunSpec
from elastic_train.train.boundary.boundary_log import BoundaryLog
from elastic_train.train.boundary.logged_edges import Instead
from elastic_train.train.collectives.process_group import Group
from elastic_train.train.model.build import draw
from elastic_train.train.parallel.pipeline_stages import stages_of
from elastic_train.train.rank_assignment import ReplaySeat
from elastic_train.train.state.carried_logs import opened
from elastic_train.train.state.shards import Shards
from elastic_train.train.task import Task


def replaying_group(seat: ReplaySeat, device: str, form_timeout_s: float) -> Group:
    """Those that replay the same stages, and nobody else; not formed yet."""
    size = len(seat.stand_in.ranks)
    if size == 1:
        return Group.alone(seat.during, device)
    return Group(
        generation=seat.during,
        rank=seat.number,
        world_size=size,
        store_host=seat.store_host,
        store_port=seat.store_port,
        address=seat.address,
        device=device,
        form_timeout_s=form_timeout_s,
        meeting=f"/replay/{seat.stand_in.stages[0]}",
    )


def instead_of(seat: ReplaySeat, task: Task, spec: RunSpec) -> Instead:
    """Tensors of stages that are not lost are hidden: their survivors give them."""
    lost = seat.stand_in.lost
    mine = {lost.mesh.coordinate(rank)["pp"] for rank in seat.ranks}
    hidden: frozenset[str] = frozenset()
    if len(mine) < seat.stand_in.stages[1] - seat.stand_in.stages[0]:
        blueprint = draw(task, spec.precision)
        placed = stages_of(blueprint, task.parallelize(), lost.stages)
        hidden = frozenset(fqn for fqn, stages in placed.items() if not mine & set(stages))
    return Instead(stand_in=seat.stand_in, ranks=seat.ranks, hidden=hidden)


def opened_instead(shards: Shards, spec: RunSpec) -> BoundaryLog | None:
    """What the lost rank had logged is logged again, so that its neighbours can be replayed next.

    Not for several stages that run as one: what crosses between them is nobody's to send.
    """
    assert shards.instead is not None
    first, stop = shards.instead.stand_in.stages
    return opened(spec, shards.instead.stand_in.lost) if stop - first == 1 else None
