"""Skip initialisation of meta tensors."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch.overrides import TorchFunctionMode


class SkipInit(TorchFunctionMode):
    """Within it, tensors on the meta device are filled neither with random values nor by `torch.nn.init`.

    torch computes what such a fill would do, most of the time that a model takes there: a group that forms
    waits for it.
    """

    _FILLS: ClassVar = frozenset(
        {
            torch.Tensor.bernoulli_,
            torch.Tensor.cauchy_,
            torch.Tensor.exponential_,
            torch.Tensor.geometric_,
            torch.Tensor.log_normal_,
            torch.Tensor.normal_,
            torch.Tensor.random_,
            torch.Tensor.uniform_,
        }
    )

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # Some functions of torch.nn.init come here themselves, of the others the fills within.
        if func in self._FILLS or getattr(func, "__module__", "") == "torch.nn.init":
            filled = args[0] if args else kwargs.get("tensor")
            if isinstance(filled, torch.Tensor) and filled.is_meta:
                return filled
        return func(*args, **kwargs)
