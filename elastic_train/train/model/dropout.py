"""Dropout whose mask is a function of a key and the logical index of an element.

The key is drawn from torch's CPU generator, so activation checkpointing, which restores that generator,
reproduces the mask. The mask of an element doesn't depend on the other elements: a shard of a tensor gets its
part of the mask that the whole would get.

Four elements share one 64-bit word, the SplitMix64 finaliser (Steele, Lea and Flood, OOPSLA 2014; constants
of Stafford's variant 13) of word index times the golden gamma plus key, 16 bits each. The probability is
therefore a multiple of 2^-16, and kept elements are scaled by that multiple, so that the expectation is
exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))
_LEVELS = 1 << 16
_ALPHA = -1.7580993408473766  # limit of SELU for large negative inputs (Klambauer et al. 2017)


@dataclass(frozen=True, slots=True)
class Slice:
    """Of plain tensors with more than one dim, dim 1 is the `index`-th of `count` equal parts of a whole."""

    index: int
    count: int


_slice: Slice | None = None


@contextmanager
def keyed_dropout(part: Slice | None = None) -> Iterator[None]:
    """While open, every dropout of torch.nn draws its mask by key; torch.nn.MultiheadAttention's own too.

    All functions of torch.nn.functional reach the native code through the namespace `torch._VF`, and a name
    set there goes before the native one. scaled_dot_product_attention draws inside its kernel and is not
    keyed.
    """
    global _slice
    for name, replacement in _REPLACEMENTS.items():
        setattr(torch._VF, name, replacement)
    _slice = part
    try:
        yield
    finally:
        _slice = None
        for name in _REPLACEMENTS:
            delattr(torch._VF, name)


def draw_key() -> int:
    """A 63-bit key from torch's CPU generator."""
    return int(torch.empty((), dtype=torch.int64).random_())


def keep_mask(
    key: int,
    shape: tuple[int, ...],
    p: float,
    *,
    device: torch.device | str = "cpu",
    whole: tuple[int, ...] | None = None,
    offsets: tuple[int, ...] | None = None,
) -> Tensor:
    """Which elements stay: bool, of `shape`, the block at `offsets` of a tensor of shape `whole`."""
    below = round(p * _LEVELS) - _LEVELS // 2
    if whole is None or whole == shape:
        count = math.prod(shape)
        words = _words((count + 3) // 4, torch.device(device))
        lanes = _mixed(words + _signed(key)).view(torch.int16)
        return (lanes >= below)[:count].view(shape)
    assert offsets is not None
    index = torch.zeros((), dtype=torch.int64, device=device)
    for size, offset, extent in zip(shape, offsets, whole, strict=True):
        index = index.unsqueeze(-1) * extent + torch.arange(offset, offset + size, device=device)
    lanes = _mixed((index >> 2) * _GAMMA + _signed(key)) >> ((index & 3) * 16)
    return lanes.to(torch.int16) >= below


def effective_probability(p: float) -> float:
    """The nearest probability that the masks have."""
    return round(p * _LEVELS) / _LEVELS


def _dropout(x: Tensor, p: float, training: bool) -> Tensor:
    return _apply(torch.dropout, x, p, training, _scaled, feature=False, inplace=False)


def _dropout_(x: Tensor, p: float, training: bool) -> Tensor:
    return _apply(torch.dropout_, x, p, training, _scaled, feature=False, inplace=True)


def _feature_dropout(x: Tensor, p: float, training: bool) -> Tensor:
    return _apply(torch.feature_dropout, x, p, training, _scaled, feature=True, inplace=False)


def _feature_dropout_(x: Tensor, p: float, training: bool) -> Tensor:
    return _apply(torch.feature_dropout_, x, p, training, _scaled, feature=True, inplace=True)


def _alpha_dropout(x: Tensor, p: float, training: bool) -> Tensor:
    return _apply(torch.alpha_dropout, x, p, training, _alpha, feature=False, inplace=False)


def _alpha_dropout_(x: Tensor, p: float, training: bool) -> Tensor:
    return _apply(torch.alpha_dropout_, x, p, training, _alpha, feature=False, inplace=True)


def _feature_alpha_dropout(x: Tensor, p: float, training: bool) -> Tensor:
    return _apply(torch.feature_alpha_dropout, x, p, training, _alpha, feature=True, inplace=False)


def _feature_alpha_dropout_(x: Tensor, p: float, training: bool) -> Tensor:
    return _apply(torch.feature_alpha_dropout_, x, p, training, _alpha, feature=True, inplace=True)


_REPLACEMENTS = {
    "dropout": _dropout,
    "dropout_": _dropout_,
    "feature_dropout": _feature_dropout,
    "feature_dropout_": _feature_dropout_,
    "alpha_dropout": _alpha_dropout,
    "alpha_dropout_": _alpha_dropout_,
    "feature_alpha_dropout": _feature_alpha_dropout,
    "feature_alpha_dropout_": _feature_alpha_dropout_,
}


def _apply(
    native: Callable[..., Tensor],
    x: Tensor,
    p: float,
    training: bool,
    combine: Callable[[Tensor, Tensor, float, bool], Tensor],
    *,
    feature: bool,
    inplace: bool,
) -> Tensor:
    """`native`, with the mask by key; `feature` drops whole channels of (batch, channel, ...)."""
    if not training or not 0 < p < 1 or x.numel() == 0 or torch.compiler.is_compiling():
        return native(x, p, training)
    return combine(x, _mask_like(x, p, feature), effective_probability(p), inplace)


def _scaled(x: Tensor, mask: Tensor, p: float, inplace: bool) -> Tensor:
    noise = mask.to(x.dtype).mul_(1 / (1 - p) if p < 1 else 0.0)
    return x.mul_(noise) if inplace else x * noise


def _alpha(x: Tensor, mask: Tensor, p: float, inplace: bool) -> Tensor:
    """Dropped elements become alpha, and the affine map restores mean 0 and variance 1."""
    scale = 1 / math.sqrt((1 - p) * (1 + p * _ALPHA**2)) if p < 1 else 0.0
    kept = mask.to(x.dtype)
    shift = (1 - kept).mul_(_ALPHA * scale).sub_(_ALPHA * scale * p)
    noise = kept * scale
    return x.mul_(noise).add_(shift) if inplace else x * noise + shift


def _mask_like(x: Tensor, p: float, feature: bool) -> Tensor:
    key = draw_key()
    if not isinstance(x, DTensor):
        shape = _mask_shape(x.shape, feature)
        if _slice is None or x.ndim < 2:
            return keep_mask(key, shape, p, device=x.device)
        whole = (shape[0], shape[1] * _slice.count, *shape[2:])
        offsets = (0, shape[1] * _slice.index, *(0 for _ in shape[2:]))
        return keep_mask(key, shape, p, device=x.device, whole=whole, offsets=offsets)
    if any(placement.is_partial() for placement in x.placements):
        raise RuntimeError(
            "dropout of a partial DTensor: redistribute it first, its elements are not known yet"
        )
    whole = _mask_shape(x.shape, feature)
    local, offsets = compute_local_shape_and_global_offset(x.shape, x.device_mesh, x.placements)
    part = tuple(1 if w == 1 else n for n, w in zip(local, whole, strict=True))
    at = tuple(0 if w == 1 else o for o, w in zip(offsets, whole, strict=True))
    mask = keep_mask(key, part, p, device=x.to_local().device, whole=whole, offsets=at)
    return DTensor.from_local(
        mask.expand(local), x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride()
    )


def _mask_shape(shape: tuple[int, ...], feature: bool) -> tuple[int, ...]:
    return (*shape[:2], *(1 for _ in shape[2:])) if feature else tuple(shape)


_table: dict[torch.device, Tensor] = {}


def _words(count: int, device: torch.device) -> Tensor:
    """Word index times gamma, for the first `count` words; grown to the largest tensor seen."""
    table = _table.get(device)
    if table is None or table.numel() < count:
        table = _table[device] = torch.arange(count, dtype=torch.int64, device=device) * _GAMMA
    return table[:count]


def _mixed(word: Tensor) -> Tensor:
    """SplitMix64's finaliser, in place. torch shifts copies of the sign in, which must be masked off."""
    word ^= (word >> 30).bitwise_and_((1 << 34) - 1)
    word *= _MIX[0]
    word ^= (word >> 27).bitwise_and_((1 << 37) - 1)
    word *= _MIX[1]
    word ^= (word >> 31).bitwise_and_((1 << 33) - 1)
    return word


def _signed(value: int) -> int:
    """The int64 with the bits of an unsigned 64-bit number."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value
