"""The CRC-32C of a whole fragment, from those of its pages: so its bytes are summed in one go.

The CRC of two messages after another is that of the first one moved by the length of the second, xor that of
the second; moving by a length is linear over GF(2) (M. Adler, crc32_combine in zlib).
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

from elastic_train.checkpoint.checksums import LARGEST, MOST_PAGES, SMALLEST

POLYNOMIAL = 0x82F63B78
"""Castagnoli's, reflected."""
Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint32]


def of_fragments(sums: Words, first: Ints, counts: Ints, sizes: Ints) -> Words:
    """CRCs of fragments, [n]: their pages' are `sums[first : first + counts]`; 0 where there is none."""
    found = np.zeros(len(sizes), dtype=np.uint32)
    there = counts > 0
    found[there] = sums[first[there]]
    page = page_sizes(sizes)
    for size in np.unique(page[counts > 1]).tolist():
        rows = np.flatnonzero((page == size) & (counts > 1))
        rows = rows[np.argsort(-counts[rows])]  # those with most pages first: the others leave at the end
        whole = counts[rows] - 2  # pages of this size that follow the first one
        for step in range(int(whole[0])):
            some = rows[: int(np.searchsorted(-whole, -step))]
            found[some] = _moved(found[some], size) ^ sums[first[some] + 1 + step]
        rest = sizes[rows] - size * (counts[rows] - 1)
        end = found[rows]
        for bit in range(size.bit_length()):
            some = (rest >> bit) & 1 == 1
            end[some] = _moved(end[some], 1 << bit)
        found[rows] = end ^ sums[first[rows] + counts[rows] - 1]
    return found


def page_sizes(sizes: Ints) -> Ints:
    """`checksums.page_bytes` of many fragments."""
    page = np.full(len(sizes), SMALLEST, dtype=np.int64)
    while (small := (page < LARGEST) & (page * MOST_PAGES < sizes)).any():
        page[small] *= 2
    return page


def _moved(crc: Words, length: int) -> Words:
    """CRCs moved by `length` bytes, a power of two."""
    table = _table(length)
    low, high = table[0][crc & 0xFF] ^ table[1][crc >> 8 & 0xFF], table[2][crc >> 16 & 0xFF]
    return low ^ high ^ table[3][crc >> 24]


@cache
def _table(length: int) -> Words:
    """What each value of each byte of a CRC becomes, [4, 256]."""
    if length == 1:
        columns = np.array([1 << bit for bit in range(32)], dtype=np.uint32)
        for _ in range(8):
            columns = (columns >> 1) ^ np.where(columns & 1, np.uint32(POLYNOMIAL), np.uint32(0))
    else:
        half = length // 2
        columns = _moved(_moved(np.array([1 << bit for bit in range(32)], dtype=np.uint32), half), half)
    values = np.arange(256, dtype=np.uint32)
    table = np.zeros((4, 256), dtype=np.uint32)
    for bit in range(32):
        table[bit // 8] ^= np.where(values >> bit % 8 & 1, columns[bit], np.uint32(0))
    return table
