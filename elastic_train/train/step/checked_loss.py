"""Check what a task's `loss` returned."""

from __future__ import annotations

from typing import Any

import torch

from elastic_train.errors import ConfigError


def checked_loss(loss: Any, count: Any) -> float:
    """The count of a micro-batch; ConfigError where its loss is no sum to take a gradient of."""
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
        what = (
            f"a tensor of shape {tuple(loss.shape)}"
            if isinstance(loss, torch.Tensor)
            else type(loss).__name__
        )
        raise ConfigError(
            field="task.loss",
            problem=f"its first value must be a summed loss that depends on the parameters, not {what}.",
        )
    return float(count)
