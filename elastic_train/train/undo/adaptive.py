"""Optimizers that divide by a root of squares: Adam, AdamW, LAMB, Adagrad, RMSprop."""

from __future__ import annotations

import math

import torch

from elastic_train.train.undo import foreach
from elastic_train.train.undo.bucket import (
    LOST,
    MAX_AMPLIFICATION,
    Bucket,
    Refusal,
    Undone,
    grown,
    lost_digits,
    refuse_lost,
    without_average,
    without_square,
)
from elastic_train.train.undo.foreach import Tensors

ROUNDS = 100
"""Iterations for LAMB's trust ratio; each gains at least the digits of lr."""


def adam(bucket: Bucket) -> Undone:
    """p = p' - lr / (1 - b1^t) m / (sqrt(v / (1 - b2^t)) + eps), with decay in the gradient or decoupled."""
    settings = bucket.settings
    if settings.get("amsgrad"):
        raise Refusal("amsgrad keeps only the largest second moment, what it was before is lost")
    lr, decay = bucket.number("lr"), bucket.number("weight_decay")
    decoupled = bool(settings.get("decoupled_weight_decay"))
    update = _adam_update(bucket)
    moved = foreach.add(bucket.parameters, update, alpha=lr)
    parameters = grown(moved, lr * decay) if decoupled else moved
    gradients = bucket.ascent()
    if decay and not decoupled:
        gradients = foreach.add(gradients, parameters, alpha=decay)
    return {"param": parameters, **_adam_moments(bucket, gradients)}


def lamb(bucket: Bucket) -> Undone:
    """p = p' - lr r u with u = Adam's update + wd p', and the trust ratio r = |p'| / |u| of the whole tensor.

    r is the solution of a fixed-point equation: p' is known from r, and r from p'.
    """
    lr, decay = bucket.number("lr"), bucket.number("weight_decay")
    parameters: Tensors = []
    for place, (parameter, update) in enumerate(zip(bucket.parameters, _adam_update(bucket), strict=True)):
        parameters.append(_before_lamb(parameter.double(), update.double(), lr, decay, place).to(parameter))
    return {"param": parameters, **_adam_moments(bucket, bucket.ascent())}


def adagrad(bucket: Bucket) -> Undone:
    """s = s' + g^2; p = p' - c g / (sqrt(s) + eps), with wd p' in g."""
    rate = bucket.number("lr") / (1.0 + (bucket.updates - 1) * bucket.number("lr_decay"))
    squares = bucket.states["sum"]
    roots = foreach.add(foreach.root(squares), bucket.number("eps"))
    gradients, parameters = _scaled_decay(bucket, roots, rate)
    if bucket.updates == 1:
        start = bucket.number("initial_accumulator_value")
        older = [torch.full_like(value, start) for value in squares]
    else:
        older = foreach.add_product(squares, gradients, gradients, value=-1.0)
        refuse_lost(older, squares, "sum")
    return {"param": parameters, "sum": older}


def rmsprop(bucket: Bucket) -> Undone:
    """v = a v' + (1 - a) g^2, centred by an average of g; p = p' - lr g / (sqrt(v) + eps), or by momentum."""
    alpha, momentum = bucket.number("alpha"), bucket.number("momentum")
    lr, decay = bucket.number("lr"), bucket.number("weight_decay")
    squares = bucket.states["square_avg"]
    if bucket.settings["centered"]:
        means = bucket.states["grad_avg"]
        roots = foreach.root(foreach.add_product(squares, means, means, value=-1.0))
    else:
        roots = foreach.root(squares)
    roots = foreach.add(roots, bucket.number("eps"))
    undone: Undone = {}
    if momentum > 0:
        parameters = foreach.add(bucket.parameters, bucket.states["momentum_buffer"], alpha=lr)
        gradients = bucket.ascent()
        if decay:
            gradients = foreach.add(gradients, parameters, alpha=decay)
        undone["momentum_buffer"] = _without_momentum(bucket, gradients, roots, momentum)
    else:
        gradients, parameters = _scaled_decay(bucket, roots, lr)
    undone["param"] = parameters
    if bucket.updates == 1:
        undone["square_avg"] = [torch.zeros_like(value) for value in squares]
        if bucket.settings["centered"]:
            undone["grad_avg"] = [torch.zeros_like(value) for value in squares]
        return undone
    undone["square_avg"] = without_square(squares, gradients, alpha)
    refuse_lost(undone["square_avg"], squares, "square_avg")
    if bucket.settings["centered"]:
        undone["grad_avg"] = without_average(bucket.states["grad_avg"], gradients, alpha)
    return undone


def _adam_update(bucket: Bucket) -> Tensors:
    """The step's direction: corrected first moment over the root of the corrected second."""
    first, second = (float(beta) for beta in bucket.settings["betas"])
    corrected = bool(bucket.settings.get("bias_correction", True))
    first_weight = 1.0 - first**bucket.updates if corrected else 1.0
    second_weight = 1.0 - second**bucket.updates if corrected else 1.0
    roots = foreach.divide(foreach.root(bucket.states["exp_avg_sq"]), math.sqrt(second_weight))
    roots = foreach.add(roots, bucket.number("eps"))
    return foreach.divide(foreach.divide(bucket.states["exp_avg"], first_weight), roots)


def _adam_moments(bucket: Bucket, gradients: Tensors) -> Undone:
    """Both moments before the step. The first step started from zeros, exactly.

    An element whose moments both vanish to rounding had no gradient before: it is set to zero. One whose
    second moment alone vanishes is refused: the next step would divide by what is left of it.
    """
    averages, squares = bucket.states["exp_avg"], bucket.states["exp_avg_sq"]
    if bucket.updates == 1:
        zeros = [torch.zeros_like(value) for value in averages]
        return {"exp_avg": zeros, "exp_avg_sq": [torch.zeros_like(value) for value in averages]}
    first, second = (float(beta) for beta in bucket.settings["betas"])
    older = without_average(averages, gradients, first)
    older_squares = without_square(squares, gradients, second)
    everything = zip(older, older_squares, averages, squares, strict=True)
    for place, (m, v, after, after_square) in enumerate(everything):
        limit = LOST * torch.finfo(m.dtype).eps
        untouched = (v.abs() <= limit * after_square) & (m.abs() <= limit * after.abs())
        count = int((lost_digits(v, after_square) & ~untouched).sum())
        if count:
            raise Refusal(
                f"the last gradient outweighs all before it in {count} elements, whose second moment "
                f"before step {bucket.updates} is lost in rounding",
                place,
            )
        m.masked_fill_(untouched, 0.0)
        v.masked_fill_(untouched, 0.0)
    return {"exp_avg": older, "exp_avg_sq": older_squares}


def _scaled_decay(bucket: Bucket, roots: Tensors, rate: float) -> tuple[Tensors, Tensors]:
    """The gradients with decay, and p' from p = p' - rate (g + wd p') / root."""
    gradients, decay = bucket.ascent(), bucket.number("weight_decay")
    moved = foreach.add_quotient(bucket.parameters, gradients, roots, value=rate)
    if not decay:
        return gradients, moved
    parameters: Tensors = []
    for place, (value, root) in enumerate(zip(moved, roots, strict=True)):
        kept = 1.0 - rate * decay / root
        if value.numel() and not bool((kept.abs() >= 1.0 / MAX_AMPLIFICATION).all()):
            raise Refusal("the scaled decay of one step leaves too little of some elements to undo it", place)
        parameters.append(value / kept)
    return foreach.add(gradients, parameters, alpha=decay), parameters


def _without_momentum(bucket: Bucket, gradients: Tensors, roots: Tensors, momentum: float) -> Tensors:
    if momentum < 1.0 / MAX_AMPLIFICATION:
        raise Refusal(f"a momentum that keeps only {momentum:.3g} of itself cannot be undone")
    if bucket.updates == 1:
        return [torch.zeros_like(value) for value in bucket.states["momentum_buffer"]]
    older = foreach.add_quotient(bucket.states["momentum_buffer"], gradients, roots, value=-1.0)
    return foreach.divide(older, momentum)


def _before_lamb(
    after: torch.Tensor, update: torch.Tensor, lr: float, decay: float, place: int
) -> torch.Tensor:
    before, ratio = after, -1.0
    for _ in range(ROUNDS):
        step = update + decay * before
        norm, size = float(torch.linalg.vector_norm(before)), float(torch.linalg.vector_norm(step))
        found = norm / size if norm > 0 and size > 0 else 1.0
        if not 1.0 - lr * found * decay >= 1.0 / MAX_AMPLIFICATION:
            break
        before = (after + lr * found * update) / (1.0 - lr * found * decay)
        if abs(found - ratio) <= 1e-14 * found:
            return before
        ratio = found
    raise Refusal("the trust ratio of the step cannot be found again", place)
