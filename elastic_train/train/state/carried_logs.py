"""Boundary logs across generations: which are kept, reopened or closed when the plan changes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from elastic_train.config import RunSpec
from elastic_train.planner.plan import Plan
from elastic_train.recovery.replayable_steps import Sent
from elastic_train.train.boundary.boundary_log import FLUSH_S, BoundaryLog, Room
from elastic_train.train.state.shards import Shards


def loggable(plan: Plan) -> bool:
    """Whether a stage of the plan could be replayed without its neighbours."""
    return plan.mesh.pp > 1 and plan.virtual == 1


def opened(spec: RunSpec, plan: Plan) -> BoundaryLog | None:
    """A log without anything in it; None where none is kept."""
    room = spec.boundary_logs
    if room is None or not loggable(plan) or spec.optimizer_in_backward:
        return None
    return BoundaryLog(
        Room(
            memory=room.memory_bytes,
            waiting=room.waiting_bytes,
            disk=room.disk_bytes,
            directory=Path(room.directory) if room.directory is not None else None,
        )
    )


def carried(shards: Shards, held: Iterable[Shards], continued: int | None) -> BoundaryLog | None:
    """The log of the same stage's local state, where generation `continued` is what `shards` go on from.

    Only if the stages and the order of micro-batches are the same. What was sent after the step is dropped.
    """
    wanted = _sends_as(shards.plan, shards.rank)
    for before in held:
        if before.substituted is None:
            same = _sends_as(before.plan, before.rank) == wanted
        else:
            lost = before.substituted.substitute.lost
            same = any(_sends_as(lost, rank) == wanted for rank in before.substituted.ranks)
        if before.log is not None and same and (before.generation, before.step) == (continued, shards.step):
            assert shards.step is not None
            before.log.drop(shards.step + 1)
            return before.log
    return None


def _sends_as(plan: Plan, rank: int) -> object:
    """What has to be the same for a log to go on."""
    return plan.mesh, plan.stages, plan.shares, plan.groups, rank


def follow(
    shards: Shards, held: Iterable[Shards], continued: int | None, spec: RunSpec
) -> BoundaryLog | None:
    """The log that goes on, or a new one; those that don't are closed."""
    before = tuple(held)
    log = carried(shards, before, continued)
    close_logs(old for old in before if old.log is not log)
    return log if log is not None else opened(spec, shards.plan)


def close_logs(held: Iterable[Shards]) -> None:
    for shards in held:
        if shards.log is not None:
            shards.log.close()
            shards.log = None


@contextmanager
def rolled(shards: Shards) -> Iterator[None]:
    """Around a roll of shards: a step that it completes has its outcome now."""
    before = shards.step
    yield
    shards.mark_made()
    if shards.log is not None and shards.applied is not None and shards.step != before:
        shards.log.seal(shards.applied)


def reported(shards: Shards) -> Sent | None:
    """What the log of a stage can give to the replay of others."""
    log, place, edges = shards.log, shards.place, shards.edges
    if log is None or (shards.substituted is not None and not shards.substituted.ranks):
        return None
    log.flush(FLUSH_S)
    reach = log.reach()
    if reach is None:
        return None
    first, last, ahead = reach
    shared = {tuple(map(edges.stage_of, place.stages_of(fqn))) for fqn in shards.whole.trainable}
    rank = shards.rank if shards.substituted is None else shards.substituted.ranks[0]
    index = rank % (edges.plan.mesh.size // edges.plan.mesh.pp)
    ties = {(a, b) for stages in shared for a in stages for b in stages if a < b}
    return Sent(
        generation=shards.generation,
        stage=edges.first,
        index=index,
        first=first,
        last=last,
        ahead=ahead,
        ties=tuple(sorted(ties)),
    )
