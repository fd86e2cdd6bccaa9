"""Keep no copies of weights in compute precision from forward to backward: cast them again there.

Autocast multiplies by a cast of each weight, which autograd saves for backward: two bytes for each parameter,
of all blocks, although dp_shard frees the weights themselves. The weight is there again when backward needs
it, and a cast of it has the same bits.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

_VIEWS = frozenset({"TBackward0", "TransposeBackward0", "PermuteBackward0"})
"""What a layer may do to a cast before it multiplies: nothing that moves bytes."""


@dataclass(frozen=True, slots=True)
class _Cast:
    """A view of a cast of a parameter, to be made again."""

    weight: torch.Tensor
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


def cast_again(enabled: bool) -> AbstractContextManager[object]:
    """The context of a forward whose backward casts weights again; nothing where not `enabled`."""
    return torch.autograd.graph.saved_tensors_hooks(_pack, _unpack) if enabled else nullcontext()


def _pack(saved: torch.Tensor) -> torch.Tensor | _Cast:
    weight = _cast_weight(saved)
    if weight is None:
        return saved
    return _Cast(weight, saved.dtype, saved.size(), saved.stride(), int(saved.storage_offset()))


def _unpack(packed: torch.Tensor | _Cast) -> torch.Tensor:
    if isinstance(packed, torch.Tensor):
        return packed
    cast = packed.weight.detach().to(packed.dtype)
    return cast.as_strided(packed.size, packed.stride, packed.offset)


def _cast_weight(saved: torch.Tensor) -> torch.Tensor | None:
    """The parameter that a tensor is a view of a cast of; None where it is something else."""
    node = saved.grad_fn
    while node is not None and node.name() in _VIEWS:
        node = node.next_functions[0][0]
    if node is None or node.name() != "ToCopyBackward0":
        return None
    weight = getattr(node.next_functions[0][0], "variable", None)
    if not isinstance(weight, nn.Parameter) or isinstance(saved, DTensor):
        return None
    return weight if weight.dtype != saved.dtype and weight.numel() == saved.numel() else None
