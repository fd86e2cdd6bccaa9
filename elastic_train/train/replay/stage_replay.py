"""Replay the steps of a lost pipeline stage from its neighbours' boundary logs.

It is the code path of the step itself. With the ranks that the stage had it is equal to the bit; idle workers
may join as replicas, each with a share of the micro-batches: their gradients are summed once a step, in the
order of the shares, and so of the ids.
"""

from __future__ import annotations

from elastic_train.train.boundary.boundary_log import FLUSH_S
from elastic_train.train.boundary.crossing import KeptCrossings
from elastic_train.train.state.shards import Shards
from elastic_train.train.step.stepper import Stepper
from elastic_train.train.step.update import apply
from elastic_train.train.step.workload import GroupContext, Workload


def replay(
    workload: Workload, context: GroupContext, shards: Shards, kept: KeptCrossings, through: int
) -> None:
    """Take filled shards up to a step. KeyError where `kept` lacks something: take the next rung."""
    stepper = Stepper(workload, context, shards, replayed=kept)
    assert shards.step is not None
    for step in range(shards.step + 1, through + 1):
        stepper.gradients(step)
        vote = kept.vote(step)
        with shards.lock:
            shards.pending.reached = step
        apply(shards, vote, workload.spec)
        if shards.log is not None:
            shards.log.seal(vote)
    if shards.log is not None:
        shards.log.flush(FLUSH_S)  # others may read it at once
