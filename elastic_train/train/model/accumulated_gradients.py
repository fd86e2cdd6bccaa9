"""Hear that a parameter's gradient is there, without keeping the parameter in memory.

What torch calls after a gradient was accumulated is hidden from Python's collector (seen with torch 2.13 and
2.14): a parameter that its own hook leads to is never freed, nor what that leads to, as groups and buckets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakMethod

import torch
from torch import nn


class _Hook:
    def __init__(self, hear: Callable[..., None], where: tuple[Any, ...]) -> None:
        self._hear, self._where = WeakMethod(hear), where

    def __call__(self, _parameter: torch.Tensor) -> None:
        if (hear := self._hear()) is not None:
            hear(*self._where)


def when_accumulated(parameter: nn.Parameter, hear: Callable[..., None], *where: Any) -> None:
    """Call the method `hear` with `where`, as long as its object is there."""
    parameter.register_post_accumulate_grad_hook(_Hook(hear, where))
