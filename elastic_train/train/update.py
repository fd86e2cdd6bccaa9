"""Apply a voted step: the one code path of a normal step and of a roll forward, equal to the bit."""

from __future__ import annotations

import math

from elastic_train.config import RunSpec
from elastic_train.recovery.evidence import Vote
from elastic_train.train.reduce import local_gradient
from elastic_train.train.shards import Shards
from elastic_train.train.vote import Ballot

CLIP_EPSILON = 1e-6
"""Added to the norm before dividing by it, as torch's clip_grad_norm_ does."""


def apply(shards: Shards, vote: Vote, spec: RunSpec) -> None:
    """Take shards at step - 1, with the reduced gradient in `grad`, to the vote's step.

    A skipped step changes only the count. The shards are torn from the first change to the last.
    """
    assert shards.step == vote.step - 1 == (shards.reached or 0) - 1
    ballot = Ballot.unpacked(vote.values)
    with shards.lock:
        shards.step = None
    if not ballot.skipped:
        _scale(shards, gradient_factor(ballot, spec))
        shards.optimizer.step()
        if shards.schedule is not None:
            shards.schedule.step(ballot.loss / ballot.count)
        for fqn, value in shards.pending_buffers.items():
            shards.buffers[fqn].copy_(value)
    with shards.lock:
        shards.pending_buffers = {}
        shards.reached, shards.applied, shards.step = None, vote, vote.step


def gradient_norm(ballot: Ballot, spec: RunSpec) -> float:
    """Norm of the gradient of the mean loss over the global batch; NaN where there is none."""
    if ballot.count <= 0 or ballot.nonfinite > 0:
        return math.nan
    return math.sqrt(ballot.squares) * spec.batch.global_size / ballot.count


def gradient_factor(ballot: Ballot, spec: RunSpec) -> float:
    """What turns the summed gradient, divided by the nominal count, into the clipped mean."""
    mean = spec.batch.global_size / ballot.count
    if spec.clip_norm is None:
        return mean
    return mean * min(1.0, spec.clip_norm / (gradient_norm(ballot, spec) + CLIP_EPSILON))


def _scale(shards: Shards, factor: float) -> None:
    if factor == 1.0:
        return
    for parameter in shards.parameters.values():
        if parameter.grad is not None:
            local_gradient(parameter).mul_(factor)
