"""Find tensors in plain attributes of modules: neither parameters nor buffers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

_OWN = frozenset({"_parameters", "_buffers", "_modules", "_flat_weights", "_flat_weight_refs"})
"""Where torch itself keeps tensors of a module; recurrent layers hold a list of theirs in step."""
_DEPTH = 4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stray:
    """A tensor in an attribute: `path` as a person would write it."""

    module: nn.Module
    path: str
    tensor: torch.Tensor


def strays(model: nn.Module) -> Iterator[Stray]:
    """Tensors in attributes, and in lists, tuples, sets and mappings there. What a hook computes anew before
    each forward, as old weight norms do, has a history and is left out."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in _OWN:
                where = f"{path}.{name}" if path else name
                yield from (Stray(module=module, path=at, tensor=t) for at, t in _tensors(where, value, 0))


def _tensors(path: str, value: object, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        if value.is_leaf:
            yield path, value
    elif depth < _DEPTH and isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _tensors(f"{path}[{key!r}]", inner, depth + 1)
    elif depth < _DEPTH and isinstance(value, list | tuple | set | frozenset):
        for at, inner in enumerate(value):
            yield from _tensors(f"{path}[{at}]", inner, depth + 1)
