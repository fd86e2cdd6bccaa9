"""Check what a task's `loss` returned."""

from __future__ import annotations

import math
from typing import Any

import torch

from elastic_train.errors import ConfigError

REMEDY = (
    "Return (loss, count): the losses of a micro-batch added up, and the number of what was added, tokens or "
    "samples. Of a mean over n that is (mean * n, n)."
)


def checked_loss(returned: Any) -> tuple[torch.Tensor, float]:
    """The summed loss of a micro-batch and its count; ConfigError where it is not a pair of those."""
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        raise ConfigError(
            field="task.loss", problem=f"returned {_what(returned)} and not a pair.", remedy=REMEDY
        )
    loss, count = returned
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise ConfigError(
            field="task.loss",
            problem="its first value must be a summed loss that depends on the parameters, not "
            f"{_what(loss)}.",
            remedy=REMEDY,
        )
    try:
        number = float(count)
    except (TypeError, ValueError, RuntimeError) as error:
        number, problem = math.nan, error
    else:
        problem = None
    if not 0.0 <= number < math.inf:
        raise ConfigError(
            field="task.loss",
            problem=f"its second value must be a number from 0 on, not {_what(count)}.",
            remedy=REMEDY,
        ) from problem
    return loss, number


def _what(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        detached = "" if value.requires_grad else " without a gradient"
        return f"a tensor of shape {tuple(value.shape)}{detached}"
    if isinstance(value, tuple | list):
        return f"{len(value)} values"
    return repr(value) if isinstance(value, int | float) else type(value).__name__
