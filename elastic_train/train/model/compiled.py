"""Models and blocks that are compiled by torch: what the engine hangs on modules stays outside of them.

A hook inside would be traced with the module, and break and recompile it for each name and seed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def inside(model: nn.Module) -> set[int]:
    """Ids of the modules within those that are compiled."""
    found: set[int] = set()
    loaded = sys.modules.get(
        "torch._dynamo.eval_frame"
    )  # which takes a while; without it nothing is compiled
    for module in model.modules():
        if loaded is not None and isinstance(module, loaded.OptimizedModule):
            found |= {id(inner) for inner in module.get_submodule("_orig_mod").modules()}
        elif is_compiled_in_place(module):
            found |= {id(inner) for inner in module.modules() if inner is not module}
    return found


def is_compiled(model: nn.Module) -> bool:
    """Whether it is, or a part of it."""
    return bool(inside(model)) or any(is_compiled_in_place(module) for module in model.modules())


def is_compiled_in_place(module: nn.Module) -> bool:
    """By `module.compile()`: its hooks are compiled with it."""
    return module._compiled_call_impl is not None


def untraced(call: Callable[..., Any]) -> Callable[..., Any]:
    """A hook that belongs inside, and runs as it is: traced, its numbers would be of another precision."""

    def plain(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    return torch.compiler.disable(plain)


class Around:
    """Calls what belongs before and behind a module that is compiled in place; `remove` ends that."""

    def __init__(self, module: nn.Module, before: Callable[..., Any], after: Callable[..., Any]) -> None:
        self._module, self._call = module, module._compiled_call_impl
        self._before, self._after = before, after
        module._compiled_call_impl = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._before(self._module, args, kwargs)
        output = self._call(*args, **kwargs)  # type: ignore[misc]
        self._after(self._module, args, output)
        return output

    def remove(self) -> None:
        if self._module._compiled_call_impl is self:
            self._module._compiled_call_impl = self._call
