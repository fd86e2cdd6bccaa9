"""SGD, with momentum, Nesterov's or plain, and Lion."""

from __future__ import annotations

import torch

from elastic_train.train.undo import foreach
from elastic_train.train.undo.bucket import (
    LOST,
    MAX_AMPLIFICATION,
    Bucket,
    Refusal,
    Undone,
    grown,
    without_average,
)


def sgd(bucket: Bucket) -> Undone:
    """b = mu b' + (1 - d)(g + wd p'); p = p' - lr b, or p' - lr (g + wd p' + mu b) with Nesterov.

    A first step sets b = g + wd p' whatever the dampening d. Without dampening that is what b' = 0 gives, so
    it needs no case of its own; with dampening it cannot be told apart and is refused.
    """
    lr, decay = bucket.number("lr"), bucket.number("weight_decay")
    momentum, dampening = bucket.number("momentum"), bucket.number("dampening")
    gradients = bucket.ascent()
    if momentum == 0.0:
        return {"param": grown(foreach.add(bucket.parameters, gradients, alpha=lr), lr * decay)}
    if momentum < 1.0 / MAX_AMPLIFICATION:
        raise Refusal(f"a momentum that keeps only {momentum:.3g} of itself cannot be undone")
    buffers = bucket.states["momentum_buffer"]
    if bucket.settings["nesterov"]:
        moved = foreach.add(gradients, buffers, alpha=momentum)
        parameters = grown(foreach.add(bucket.parameters, moved, alpha=lr), lr * decay)
    else:
        parameters = foreach.add(bucket.parameters, buffers, alpha=lr)
    fresh = foreach.add(gradients, parameters, alpha=decay) if decay else gradients
    older = foreach.divide(foreach.add(buffers, fresh, alpha=dampening - 1.0), momentum)
    if dampening:
        for place, (buffer, gradient) in enumerate(zip(buffers, fresh, strict=True)):
            if buffer.numel() and torch.allclose(buffer, gradient, rtol=1e-4, atol=0.0):
                raise Refusal("a first step with dampening cannot be told from a later one", place)
    return {"param": parameters, "momentum_buffer": older}


def lion(bucket: Bucket) -> Undone:
    """u = sign(b1 m' + (1 - b1) g); p = p' (1 - lr wd) - lr u; m = b2 m' + (1 - b2) g."""
    lr, decay = bucket.number("lr"), bucket.number("weight_decay")
    first, second = (float(beta) for beta in bucket.settings["betas"])
    gradients = bucket.ascent()
    averages = bucket.states["exp_avg"]
    if second < 1.0 / MAX_AMPLIFICATION:
        raise Refusal(f"an average that keeps only {second:.3g} of itself cannot be undone")
    older = without_average(averages, gradients, second)
    directions: list[torch.Tensor] = []
    for place, (old, new, gradient) in enumerate(zip(older, averages, gradients, strict=True)):
        pull = old * first + gradient * (1.0 - first)
        rounding = LOST * torch.finfo(pull.dtype).eps * (new.abs() + gradient.abs())
        unclear = int(((pull.abs() <= rounding) & (rounding > 0)).sum())
        if unclear:
            raise Refusal(f"the direction of {unclear} elements is lost in rounding", place)
        directions.append(pull.sign())
    moved = foreach.add(bucket.parameters, directions, alpha=lr)
    return {"param": grown(moved, lr * decay), "exp_avg": older}
