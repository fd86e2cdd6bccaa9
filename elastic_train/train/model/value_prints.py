"""Fingerprints of Python values, to find out later whether they changed."""

from __future__ import annotations

import random
import zlib
from collections import deque
from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

SMALL = 64
"""Elements up to which a tensor on the host is compared by value, and above by its version."""
_DEPTH = 4


def print_of(value: Any, depth: int = 0, *, content: bool = False) -> Hashable:
    """Equal for equal values, other where one changed; what cannot be looked into is told by its identity.

    With `content` tensors are read, however large; those that a forward computed with a history are none.
    """
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return type(value).__name__, repr(value)
    if isinstance(value, nn.Parameter):
        return "id", id(value)  # parameters are watched as such
    if isinstance(value, torch.Tensor):
        return _read(value) if content else _of_tensor(value)
    if isinstance(value, np.ndarray):
        return "array", value.shape, zlib.crc32(repr(value.tolist()).encode())
    generator = _of_generator(value)
    if generator is not None:
        return "generator", generator
    if depth >= _DEPTH or isinstance(value, nn.Module | torch.optim.Optimizer | type) or callable(value):
        return "id", id(value)
    if isinstance(value, Mapping):
        return "mapping", tuple((_key(k), print_of(v, depth + 1, content=content)) for k, v in value.items())
    if isinstance(value, list | tuple | deque):
        return type(value).__name__, tuple(print_of(inner, depth + 1, content=content) for inner in value)
    if isinstance(value, set | frozenset):
        return "set", frozenset(print_of(inner, depth + 1, content=content) for inner in value)
    if hasattr(value, "__dict__") and not type(value).__module__.startswith("torch."):
        return type(value).__name__, print_of(vars(value), depth + 1, content=content)
    return "id", id(value)


def _of_generator(value: Any) -> Hashable | None:
    """The state of what random numbers are drawn from."""
    if isinstance(value, torch.Generator):
        return zlib.crc32(value.get_state().numpy().tobytes())
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return repr([part.tolist() if isinstance(part, np.ndarray) else part for part in value.get_state()])
    return hash(value.getstate()) if isinstance(value, random.Random) else None


def _of_tensor(tensor: torch.Tensor) -> Hashable:
    plain = type(tensor) is torch.Tensor and tensor.device.type == "cpu" and tensor.layout is torch.strided
    if plain and tensor.numel() <= SMALL:
        return "tensor", str(tensor.dtype), tuple(tensor.shape), repr(tensor.detach().tolist())
    return "tensor", id(tensor), tensor._version


def _read(tensor: torch.Tensor) -> Hashable:
    if tensor.grad_fn is not None or type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
        return "tensor", ""
    bits = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return "tensor", str(tensor.dtype), tuple(tensor.shape), zlib.crc32(bits.numpy().data)


def _key(key: Any) -> Hashable:
    return key if isinstance(key, str | int) else id(key)
