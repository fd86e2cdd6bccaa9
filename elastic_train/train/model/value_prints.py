"""Fingerprints of Python values, to find out later whether they changed."""

from __future__ import annotations

import random
import zlib
from collections import deque
from collections.abc import Hashable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

SMALL = 64
"""Elements up to which a tensor on the host is compared by value, and above by its version."""
ENDS = 1 << 21
"""Elements at each end of an array that are read: one may be mapped from a file larger than memory."""
LARGE = 4096
"""Entries of a container above which it is told by its identity, its length, and its ends."""
_DEPTH, _TOLD = 4, 16
_CONTEXTS = "elastic_train.train.custom."
"""Where the things are from that a loop is given: what they keep, the run carries."""
_SAID = (bool, int, float, complex, str, bytes, range, slice, np.generic, torch.device, torch.dtype)
"""Kinds of values that their repr says whole; each read may make another object of them."""


def print_of(value: Any, depth: int = 0, *, content: bool = False) -> Hashable:
    """Equal for equal values, other where one changed; what cannot be looked into is told by its identity.

    With `content` tensors are read, of large ones the ends; those that a device computed with a history are
    none.
    """
    if value is None or isinstance(value, _SAID):
        return type(value).__name__, repr(value)
    if isinstance(value, nn.Parameter):
        return "id", id(value)  # parameters are watched as such
    if isinstance(value, torch.Tensor):
        return _read(value) if content else _of_tensor(value)
    if isinstance(value, np.ndarray):
        return _of_array(value)
    generator = _of_generator(value)
    if generator is not None:
        return "generator", generator
    if type(value).__module__.startswith(_CONTEXTS):
        return "id", id(value)
    if depth >= _DEPTH or isinstance(value, nn.Module | torch.optim.Optimizer | type) or callable(value):
        return "id", id(value)
    if isinstance(value, Mapping | list | tuple | deque | set | frozenset) and len(value) > LARGE:
        ends = (*value[:_TOLD], *value[-_TOLD:]) if isinstance(value, list | tuple) else ()
        told = tuple(print_of(inner, depth + 1, content=content) for inner in ends)
        return "large", id(value), len(value), told
    if isinstance(value, Mapping):
        return "mapping", tuple((_key(k), print_of(v, depth + 1, content=content)) for k, v in value.items())
    if isinstance(value, list | tuple | deque):
        return type(value).__name__, tuple(print_of(inner, depth + 1, content=content) for inner in value)
    if isinstance(value, set | frozenset):
        return "set", frozenset(print_of(inner, depth + 1, content=content) for inner in value)
    if hasattr(value, "__dict__") and not _is_torchs(type(value).__module__):
        return type(value).__name__, print_of(vars(value), depth + 1, content=content)
    if is_dataclass(value):  # with slots
        held = ((entry.name, getattr(value, entry.name, None)) for entry in fields(value))
        told = tuple((name, print_of(inner, depth + 1, content=content)) for name, inner in held)
        return type(value).__name__, told
    return "id", id(value)


def _is_torchs(module: str) -> bool:
    """Whether objects are handles on what torch does, which say nothing of themselves."""
    return module.startswith("torch.") and not module.startswith("torch.distributions.")


def _of_generator(value: Any) -> Hashable | None:
    """The state of what random numbers are drawn from."""
    if isinstance(value, torch.Generator):
        return zlib.crc32(value.get_state().numpy().tobytes())
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return repr([part.tolist() if isinstance(part, np.ndarray) else part for part in value.get_state()])
    return hash(value.getstate()) if isinstance(value, random.Random) else None


def _of_array(array: np.ndarray) -> Hashable:
    kind = "array", array.dtype.str, array.shape
    if array.dtype.hasobject:
        return *kind, zlib.crc32(repr(array.tolist()).encode())
    ends = (array,) if array.size <= 2 * ENDS else (array.flat[:ENDS], array.flat[-ENDS:])
    return *kind, tuple(zlib.crc32(np.ascontiguousarray(end).tobytes()) for end in ends)


def _of_tensor(tensor: torch.Tensor) -> Hashable:
    plain = type(tensor) is torch.Tensor and tensor.device.type == "cpu" and tensor.layout is torch.strided
    if plain and tensor.numel() <= SMALL:
        return "tensor", str(tensor.dtype), tuple(tensor.shape), repr(tensor.detach().tolist())
    return "tensor", id(tensor), tensor._version


def _read(tensor: torch.Tensor) -> Hashable:
    computed = tensor.grad_fn is not None and tensor.device.type != "cpu"  # to rounding alone
    if computed or type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
        return "tensor", ""
    own = tensor.detach()
    if own.numel() > 2 * ENDS and own.is_contiguous():
        own = torch.cat([own.view(-1)[:ENDS], own.view(-1)[-ENDS:]])
    bits = own.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    return "tensor", str(tensor.dtype), tuple(tensor.shape), tensor._version, zlib.crc32(bits.numpy().data)


def _key(key: Any) -> Hashable:
    return key if isinstance(key, str | int) else id(key)
