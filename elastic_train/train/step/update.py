"""Apply a voted step: the one code path of a normal step and of a roll forward, equal to the bit.

A step is applied in one go after its vote, or parameter by parameter before it, with the optimizer in
backward: then `commit` does the rest, or takes everything back where the vote found a gradient that isn't
finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import nn

from elastic_train.config import RunSpec
from elastic_train.errors import UndoRefused
from elastic_train.recovery.evidence import Vote
from elastic_train.train.collectives.gradient_reduction import local_gradient
from elastic_train.train.model.average import averaging
from elastic_train.train.model.loss_scale import how_scaled
from elastic_train.train.model.rng import derive, seed_all
from elastic_train.train.state.shards import Shards
from elastic_train.train.step.batched_kernels import where_cut_alike
from elastic_train.train.step.vote import StepStatistics
from elastic_train.train.undo.partial_update import only
from elastic_train.train.undo.undo_step import undo

CLIP_EPSILON = 1e-6
"""Added to the norm before dividing by it, as torch's clip_grad_norm_ does."""


def commit(shards: Shards, vote: Vote, spec: RunSpec) -> None:
    """Take shards at step - 1 to the vote's step, whether or not parameters are there already."""
    if shards.pending.progressive is None:
        apply(shards, vote, spec)
    else:
        finish(shards, vote)


def apply(shards: Shards, vote: Vote, spec: RunSpec) -> None:
    """Take shards at step - 1, with the reduced gradient in `grad`, to the vote's step.

    A skipped step changes only the count. The shards are torn from the first change to the last.
    """
    assert shards.step == vote.step - 1 == (shards.pending.reached or 0) - 1
    statistics = StepStatistics.unpacked(vote.values)
    with shards.lock:
        shards.step = None
    if not statistics.skipped:
        if not shards.pending.scaled:
            _scale(shards.parameters.values(), unscaling(shards, statistics, spec))
        # Noise of an optimizer is the same on all ranks, and so is what is drawn after the step.
        seed_all(derive(spec.batch.seed, "update", vote.step), shards.device)
        watched = shards.moving.watching(shards.optimizer)
        with where_cut_alike(shards.optimizer), watched, averaging(shards.optimizer, shards.decay):
            shards.optimizer.step()
        shards.moving.capture(shards.optimizer)
        if shards.schedule is not None:
            shards.schedule.step(statistics.mean_loss)
        for fqn, value in shards.pending.buffers.items():
            shards.buffers[fqn].copy_(value)
    if shards.scale is not None:
        overflowed = statistics.nonfinite > 0 or shards.pending.overflowed
        if overflowed or not statistics.skipped:
            shards.scale = shards.scale.after(not overflowed, how_scaled(spec))
    shards.look_at_modules()
    shards.commit(vote)


def update(
    shards: Shards, names: Iterable[str], spec: RunSpec, check: Callable[[], None] = lambda: None
) -> None:
    """Update single parameters, whose reduced gradients are in `grad`, before the step's vote.

    One whose gradient isn't finite stays behind: the vote says so to all ranks. The shards are torn
    meanwhile. `check` raises once the group is broken: on a device a sum that a break ended looks like one
    that came, so it is asked when the gradients were read, and before anything is changed.
    """
    made = shards.pending.progressive
    assert made is not None
    chosen: dict[int, list[nn.Parameter]] = {}
    moved: list[str] = []
    for fqn in names:
        parameter = shards.parameters[fqn]
        if parameter.grad is not None:
            if not is_finite(local_gradient(parameter)):
                made.stays(fqn)
                continue
            chosen.setdefault(made.groups[fqn], []).append(parameter)
        moved.append(fqn)
    check()
    with shards.lock:
        step, shards.step = shards.step, None
    if chosen:
        _scale((p for own in chosen.values() for p in own), gradient_factor(_opening(shards), spec))
        with only(shards.optimizer, chosen), where_cut_alike(shards.optimizer):
            shards.optimizer.step()
    for fqn in moved:
        made.arrived(fqn)
    shards.mark_made()
    with shards.lock:
        shards.step = step


def finish(shards: Shards, vote: Vote) -> None:
    """Commit a step whose parameters were updated one by one. Where it is skipped they are taken back.

    The shards stay torn where that is refused: UndoRefused.
    """
    made = shards.pending.progressive
    assert made is not None
    assert not made.finished
    statistics = StepStatistics.unpacked(vote.values)
    with shards.lock:
        shards.step = None
    if statistics.skipped:
        take_back(shards)
    else:
        if shards.schedule is not None:
            shards.schedule.step(statistics.mean_loss)
        for fqn, value in shards.pending.buffers.items():
            made.buffers[fqn] = shards.buffers[fqn].clone()
            shards.buffers[fqn].copy_(value)
            made.arrived(fqn)
        made.finished = True
    shards.look_at_modules()
    shards.commit(vote)


def reopen(shards: Shards) -> None:
    """Back from `finish`: only the parameters are still ahead."""
    made = shards.pending.progressive
    assert made is not None
    assert made.finished
    with shards.lock:
        shards.step = None
    for fqn, before in made.buffers.items():
        shards.pending.buffers[fqn] = shards.buffers[fqn].clone()
        shards.buffers[fqn].copy_(before)
        made.ahead.discard(fqn)
        made.kept.add(fqn)
    made.buffers = {}
    if shards.schedule is not None and made.schedule is not None:
        shards.schedule.restore(made.schedule, made.settings)
    made.finished = False
    shards.mark_made()
    with shards.lock:
        shards.applied, shards.step = made.applied, made.step - 1


def take_back(shards: Shards) -> None:
    """Undo the parameters that are ahead, up to rounding. UndoRefused, and then nothing was changed."""
    made = shards.pending.progressive
    assert made is not None
    ahead = {fqn: shards.parameters[fqn] for fqn in sorted(made.ahead) if fqn in shards.parameters}
    try:
        undo(shards.optimizer, ahead, made.settings)
    except UndoRefused:
        made.undoable = False
        raise
    shards.undone |= {fqn for fqn, parameter in ahead.items() if parameter.grad is not None}
    shards.drop_gradients()


def gradient_norm(statistics: StepStatistics, spec: RunSpec) -> float:
    """Norm of the gradient of the mean loss over the global batch; NaN where it is not known."""
    if statistics.count <= 0 or statistics.nonfinite > 0 or statistics.squares < 0:
        return math.nan
    return math.sqrt(statistics.squares) * spec.batch.global_size / statistics.count


def gradient_factor(statistics: StepStatistics, spec: RunSpec) -> float:
    """What turns the summed gradient, divided by the nominal count, into the clipped mean."""
    mean = spec.batch.global_size / statistics.count
    if spec.clip_norm is None:
        return mean
    return mean * min(1.0, spec.clip_norm / (gradient_norm(statistics, spec) + CLIP_EPSILON))


def unscaling(shards: Shards, statistics: StepStatistics, spec: RunSpec) -> float:
    """The same for the gradient of a loss that was scaled."""
    factor = gradient_factor(statistics, spec)
    return factor if shards.scale is None else factor / shards.scale.value


def _opening(shards: Shards) -> StepStatistics:
    assert shards.pending.progressive is not None
    return StepStatistics.unpacked(shards.pending.progressive.opening.values)


def is_finite(gradient: torch.Tensor) -> bool:
    """As the vote counts it."""
    return bool(torch.linalg.vector_norm(gradient, dtype=torch.float64).isfinite())


def _scale(parameters: Iterable[nn.Parameter], factor: float) -> None:
    if factor == 1.0:
        return
    with torch.no_grad():
        for parameter in parameters:
            if parameter.grad is not None:
                local_gradient(parameter).mul_(factor)
