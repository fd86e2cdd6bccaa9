"""A digest of named tensors that doesn't depend on how they are cut.

Every element contributes a 64-bit mix of its tensor's name, its index in the whole tensor and its bits; the
digest is the sum of all contributions modulo 2^64. So boxes can be digested where they are, in any order, and
added up, each element once. It finds elements that were lost, moved, duplicated or altered; it isn't meant to
withstand an adversary. The mixing steps are those of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from elastic_train.geometry.box import Box
from elastic_train.geometry.fragments import ITEM_BYTES, Fragments

GAMMA = 0x9E3779B97F4A7C15
SPREAD = 0xD6E8FEB86659FD93
MIX = 0xBF58476D1CE4E5B9
MASK = (1 << 64) - 1
_BLOCK = 1 << 15  # elements mixed at a time, in memory that is taken once: it stays in the second-level cache


def tensor_key(tensor: str, state: str) -> int:
    """64 bits for one state of a tensor."""
    text = f"{tensor}\0{state}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def box_digest(
    array: NDArray[np.generic], *, tensor: str, state: str, box: Box, shape: tuple[int, ...]
) -> int:
    """Contribution of `box` of a tensor of shape `shape`, whose elements are in `array`, C-contiguous."""
    assert array.shape == box.sizes
    if box.numel == 0:
        return 0
    bits = array.reshape(-1).view(f"u{array.dtype.itemsize}")
    starts, run = runs(box, shape)
    rows = bits.reshape(len(starts), run)
    bases = starts.astype(np.uint64) * np.uint64(GAMMA) + np.uint64(tensor_key(tensor, state))
    total = 0
    memory = np.empty((2, min(bits.size, _BLOCK)), np.uint64)
    with np.errstate(over="ignore"):
        columns = np.arange(min(run, _BLOCK), dtype=np.uint64) * np.uint64(GAMMA)
        height = max(1, _BLOCK // run)
        for top in range(0, len(rows), height):
            for left in range(0, run, _BLOCK):
                block = rows[top : top + height, left : left + _BLOCK]
                base = bases[top : top + height, None] + np.uint64(left * GAMMA & MASK)
                total += _sum_of_mixes(block, base, columns[: block.shape[1]], memory)
    return total & MASK


def of_boxes(boxes: Fragments, arrays: Sequence[NDArray[np.uint8]]) -> int:
    """The digest of boxes given as bytes, row-major, each counted."""
    total = 0
    for row, data in enumerate(arrays):
        key, box = int(boxes.key[row]), boxes.box(row)
        bits = data.reshape(-1).view(f"u{ITEM_BYTES[boxes.dtypes[key]]}").reshape(box.sizes)
        tensor, state = boxes.names[key]
        total += box_digest(bits, tensor=tensor, state=state, box=box, shape=boxes.shapes[key])
    return total & MASK


def combine(digests: Iterable[int]) -> int:
    """The digest of several boxes together, each element among them once."""
    return sum(digests) & MASK


def runs(box: Box, shape: tuple[int, ...]) -> tuple[NDArray[np.int64], int]:
    """Where the box's stretches of neighbouring elements begin in the flat tensor, and how long each is."""
    split = len(shape)
    while split > 0 and box.sizes[split - 1] == shape[split - 1]:
        split -= 1
    split = max(split - 1, 0)  # the last dim that isn't whole still runs on
    starts = np.zeros(1, dtype=np.int64)
    for dim in range(len(shape)):
        size = box.sizes[dim] if dim < split else 1
        within = np.arange(box.offsets[dim], box.offsets[dim] + size, dtype=np.int64)
        starts = (starts[:, None] * shape[dim] + within).reshape(-1)
    return starts, math.prod(box.sizes[split:])


def _sum_of_mixes(
    bits: NDArray[np.unsignedinteger],
    base: NDArray[np.uint64],
    columns: NDArray[np.uint64],
    memory: NDArray[np.uint64],
) -> int:
    """Of a block whose elements have the positions `base + columns`; `memory` is two rows to compute in."""
    word, shifted = (row[: bits.size].reshape(bits.shape) for row in memory)
    word[...] = bits
    word *= np.uint64(SPREAD)
    word += base
    word += columns
    np.right_shift(word, np.uint64(32), out=shifted)
    word ^= shifted
    word *= np.uint64(MIX)
    np.right_shift(word, np.uint64(29), out=shifted)
    word ^= shifted
    return int(word.sum(dtype=np.uint64))
