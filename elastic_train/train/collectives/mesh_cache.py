"""Clear torch's sharding caches, which keep the meshes of earlier generations alive.

DTensor caches layouts by meshes that compare equal without regard to their groups: after a group was
destroyed and formed again it returns layouts that hold the old mesh, and collectives run on the wrong group
or hang. The caches also keep the old groups' threads and sockets alive.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch


def forget_meshes() -> None:
    """Empty every cache of torch's DTensor package, native and Python. Call it between generations."""
    native = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)
    if native is not None:
        native()
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.distributed.tensor"):
            for cached in _cached(module, len(vars(module))):
                cached.cache_clear()
    redistribute: Any = sys.modules.get("torch.distributed.tensor._redistribute")
    if redistribute is not None and hasattr(redistribute, "clear_redistribute_planner_cache"):
        redistribute.clear_redistribute_planner_cache()


def keep_backward_here() -> None:
    """From now on run backwards on the calling thread, on a device too, as on the CPU anyway.

    The native cache is of each thread, and nobody clears that of the thread which torch has for a device's
    backwards: it would find groups of earlier generations there. The calling thread only waited.
    """
    torch.autograd.set_multithreading_enabled(False)


@lru_cache(maxsize=1024)
def _cached(module: ModuleType, names: int) -> tuple[Any, ...]:
    """Functions and methods of a module with so many names under functools.cache or lru_cache.

    Looking at all of them takes 2 ms, which every forming of a group would wait for.
    """
    return tuple(_searched(module))


def _searched(module: ModuleType) -> Iterator[Any]:
    for value in list(vars(module).values()):
        members = list(vars(value).values()) if isinstance(value, type) else [value]
        for member in members:
            function = getattr(member, "__func__", member)
            if hasattr(function, "cache_clear") and hasattr(function, "cache_info"):
                yield function
