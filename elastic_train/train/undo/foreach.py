"""torch's operations on lists of tensors. They have no public names yet, so they are named here once."""

from __future__ import annotations

from typing import Any

import torch

Tensors = list[torch.Tensor]

_torch: Any = torch


def add(a: Tensors, b: Tensors | float, alpha: float = 1.0) -> Tensors:
    """a + alpha b."""
    return list(_torch._foreach_add(a, b, alpha=alpha) if isinstance(b, list) else _torch._foreach_add(a, b))


def divide(a: Tensors, b: Tensors | float) -> Tensors:
    return list(_torch._foreach_div(a, b))


def add_product(a: Tensors, b: Tensors, c: Tensors, value: float) -> Tensors:
    """a + value b c."""
    return list(_torch._foreach_addcmul(a, b, c, value=value))


def add_quotient(a: Tensors, b: Tensors, c: Tensors, value: float) -> Tensors:
    """a + value b / c."""
    return list(_torch._foreach_addcdiv(a, b, c, value=value))


def negative(a: Tensors) -> Tensors:
    return list(_torch._foreach_neg(a))


def root(a: Tensors) -> Tensors:
    return list(_torch._foreach_sqrt(a))


def copy_into(a: Tensors, b: Tensors) -> None:
    _torch._foreach_copy_(a, b)
