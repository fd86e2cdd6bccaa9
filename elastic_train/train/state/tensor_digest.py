"""State digest (geometry/digest.py) computed on the tensors' device."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from elastic_train.geometry.box import Box
from elastic_train.geometry.digest import GAMMA, MASK, MIX, SPREAD, box_digest, runs, tensor_key

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BLOCK = 1 << 24  # elements mixed at a time on a device: bounds the extra memory


def tensor_digest(local: Tensor, *, tensor: str, state: str, box: Box, shape: tuple[int, ...]) -> int:
    """Contribution of the box that `local` holds of a tensor of shape `shape`.

    The caller counts each element once: where several ranks hold a box, one of them adds it.
    """
    bits = bits_of(local)
    if bits.device.type == "cpu":
        return box_digest(bits.numpy(), tensor=tensor, state=state, box=box, shape=shape)
    return int(device_digest(bits, tensor=tensor, state=state, box=box, shape=shape)) & MASK


def bits_of(local: Tensor) -> Tensor:
    """A tensor as integers of its item size, contiguous."""
    return local.detach().contiguous().view(_BITS[local.element_size()])


def device_digest(bits: Tensor, *, tensor: str, state: str, box: Box, shape: tuple[int, ...]) -> Tensor:
    """The same number, as int64 and where the bits are, from torch operations: nothing waits for a device."""
    starts, run = runs(box, shape)
    key, column = tensor_key(tensor, state), torch.arange(run, device=bits.device) * _signed(GAMMA)
    rows = bits.reshape(len(starts), run)
    bases = torch.from_numpy(starts).to(bits.device) * _signed(GAMMA) + _signed(key)
    unsigned = (1 << 8 * bits.element_size()) - 1
    height = max(1, _BLOCK // max(run, 1))
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for top in range(0, len(rows), height):
        word = rows[top : top + height].to(torch.int64, copy=True)
        if bits.element_size() < 8:
            word &= unsigned
        word *= _signed(SPREAD)
        word += bases[top : top + height, None] + column
        word ^= (word >> 32) & ((1 << 32) - 1)
        word *= _signed(MIX)
        word ^= (word >> 29) & ((1 << 35) - 1)
        total += word.sum()
    return total


def reduced_digest(value: int, group: dist.ProcessGroup | None = None, device: str = "cpu") -> int:
    """The sum modulo 2^64 over the ranks of a group, the same number on each."""
    total = torch.tensor(_signed(value), dtype=torch.int64, device=device)
    dist.all_reduce(total, group=group)
    return int(total) & MASK


def _signed(value: int) -> int:
    """The int64 with the bits of an unsigned 64-bit number; torch's int64 arithmetic wraps around."""
    return value - (1 << 64) if value >> 63 else value
