"""The proof of an undo: the optimizer itself, stepped once more from there, comes back to where it was.

It catches what no formula can know: another version of an optimizer under the same name, a subclass, a hook.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from elastic_train.errors import UndoRefused
from elastic_train.train.undo.bucket import Bucket, Undone

TOLERANCE = 1e4
"""Roundings of a tensor's largest element by which a redone step may miss it."""


def check_redo(
    optimizer: torch.optim.Optimizer, bucket: Bucket, before: Undone, name_of: Callable[[int], str]
) -> None:
    """Step copies of the tensors forward from `before`; UndoRefused where they miss the bucket's."""
    copies = [nn.Parameter(value.clone()) for value in before["param"]]
    for copy, gradient in zip(copies, bucket.gradients, strict=True):
        copy.grad = gradient.clone()
    states = [
        {state: before[state][place].clone() for state in bucket.states if state in before}
        for place in range(len(copies))
    ]
    tried = _alone(optimizer, copies, states, bucket)
    tried.step()
    for place, copy in enumerate(copies):
        found = {"param": copy.detach(), **tried.state[copy]}
        for state in before:
            expected = bucket.parameters[place] if state == "param" else bucket.states[state][place]
            if not _close(found[state], expected):
                raise UndoRefused(
                    optimizer=type(optimizer).__name__,
                    tensor=name_of(place),
                    reason=f"stepping forward again does not lead back to its {state}",
                )


def _alone(
    optimizer: torch.optim.Optimizer,
    copies: list[nn.Parameter],
    states: list[dict[str, Any]],
    bucket: Bucket,
) -> torch.optim.Optimizer:
    """The same optimizer over copies alone. What hangs on the instance, a schedule, is left."""
    tried = object.__new__(type(optimizer))
    tried.__dict__.update({k: v for k, v in optimizer.__dict__.items() if k != "step"})
    tried.state = type(optimizer.state)(dict)
    tried.param_groups = [{**bucket.settings, "params": copies}]
    for copy, state in zip(copies, states, strict=True):
        if bucket.updates:
            state["step"] = torch.tensor(float(bucket.updates - 1), device=_counter_device(bucket, copy))
        tried.state[copy] = state
    return tried


def _counter_device(bucket: Bucket, copy: nn.Parameter) -> torch.device:
    on_device = bucket.settings.get("fused") or bucket.settings.get("capturable")
    return copy.device if on_device else torch.device("cpu")


def _close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    if expected.numel() == 0:
        return True
    limit = TOLERANCE * torch.finfo(expected.dtype).eps * expected.abs().max()
    return bool(((found - expected).abs() <= limit).all())
