"""Deep copies of models (EMA and the like) without the engine's hooks."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch import nn


class EngineHook:
    """A hook of the engine's: in a copy of its module it does nothing."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> EngineHook:
        return EngineHook(_nothing)


def let_copy(unit: nn.Module) -> None:
    """Allow copies of a module that FSDP2 shards. They hold its shards as they are, and gather nothing."""
    type(unit).__deepcopy__ = _copied  # type: ignore[attr-defined]


def _copied(unit: Any, memo: dict[int, Any]) -> nn.Module:
    unit.reshard()
    plain: Any = type(unit).__bases__[1]  # FSDP2 puts a class of its own before it
    made = plain.__new__(plain)
    memo[id(unit)] = made
    for name, value in unit.__dict__.items():
        if name.startswith("__composable_api"):  # torch's state of the sharding
            continue
        if name.endswith("_hooks"):
            value = OrderedDict((key, hook) for key, hook in value.items() if not _is_fsdps(hook))
        made.__dict__[name] = copy.deepcopy(value, memo)
    return made


def _is_fsdps(hook: Any) -> bool:
    """Hooks of calls, and those that torch wraps around loading and saving."""
    hook = getattr(hook, "hook", hook)
    owner = getattr(hook, "__func__", hook)
    return getattr(owner, "__module__", "").startswith("torch.distributed.fsdp")


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None
