"""Whether a value changed: what is left of it to compare with, small, and without keeping it alive."""

from __future__ import annotations

import random
import zlib
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

SMALL = 64
"""Elements up to which a tensor on the host is compared by value, and above by its version."""
_DEPTH = 4


def print_of(value: Any, depth: int = 0) -> Hashable:
    """Equal for equal values, other where one changed; what cannot be looked into is told by its identity."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return type(value).__name__, repr(value)
    if isinstance(value, nn.Parameter):
        return "id", id(value)  # parameters are watched as such
    if isinstance(value, torch.Tensor):
        return _of_tensor(value)
    if isinstance(value, np.ndarray):
        return (
            "array",
            value.shape,
            zlib.crc32(np.ascontiguousarray(value).tobytes()) if value.dtype != object else 0,
        )
    if isinstance(value, torch.Generator):
        return "generator", zlib.crc32(value.get_state().numpy().tobytes())
    if isinstance(value, np.random.Generator):
        return "generator", repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return (
            "generator",
            repr(value.get_state()[1:3]),
            zlib.crc32(np.asarray(value.get_state()[1]).tobytes()),
        )
    if isinstance(value, random.Random):
        return "generator", hash(value.getstate())
    if depth >= _DEPTH or isinstance(value, nn.Module | torch.optim.Optimizer | type) or callable(value):
        return "id", id(value)
    if isinstance(value, Mapping):
        return "mapping", tuple((_key(k), print_of(v, depth + 1)) for k, v in value.items())
    if isinstance(value, list | tuple):
        return type(value).__name__, _each(value, depth)
    if isinstance(value, set | frozenset):
        return "set", frozenset(_each(value, depth))
    if isinstance(value, Iterable) and hasattr(value, "__len__") and hasattr(value, "__getitem__"):
        return type(value).__name__, len(value), id(value)  # type: ignore[arg-type]
    if hasattr(value, "__dict__"):
        return type(value).__name__, print_of(vars(value), depth + 1)
    return "id", id(value)


def _of_tensor(tensor: torch.Tensor) -> Hashable:
    plain = type(tensor) is torch.Tensor and tensor.device.type == "cpu" and tensor.layout is torch.strided
    if plain and tensor.numel() <= SMALL:
        return "tensor", str(tensor.dtype), tuple(tensor.shape), repr(tensor.detach().tolist())
    return "tensor", id(tensor), tensor._version


def _each(values: Iterable[Any], depth: int) -> tuple[Hashable, ...]:
    return tuple(print_of(inner, depth + 1) for inner in values)


def _key(key: Any) -> Hashable:
    return key if isinstance(key, str | int) else id(key)
