"""Checksums of a fragment: CRC-32C of each page, so that a part of it can be verified, and a hash of all of
it.
"""

from __future__ import annotations

from collections.abc import Iterator

import crc32c
import xxhash

LARGEST, SMALLEST = 4 << 20, 64 << 10
MOST_PAGES = 64


def page_bytes(size: int) -> int:
    """Bytes of a page of a fragment of `size` bytes: of 64 KiB, 128 KiB, ... 4 MiB the first that divides it
    into at most 64 pages, else 4 MiB.

    So a rank that needs a part of a fragment reads little else. Pages count from the fragment's own first
    byte; the last one may be short.
    """
    page = SMALLEST
    while page < LARGEST and page * MOST_PAGES < size:
        page *= 2
    return page


def pages(view: memoryview) -> Iterator[memoryview]:
    """The pages of a fragment's bytes."""
    page = page_bytes(len(view))
    for start in range(0, len(view), page):
        yield view[start : start + page]


def crc(*parts: memoryview | bytes) -> int:
    """CRC-32C (Castagnoli, RFC 3720) of a page, whose bytes may lie in several places."""
    value = 0
    for part in parts:
        value = crc32c.crc32c(part, value)
    return value


def content_hash(view: memoryview | bytes) -> bytes:
    """XXH3 with 128 bits, seed 0, big-endian: the identity of a fragment's bytes."""
    return xxhash.xxh3_128_digest(view)


def running_hash() -> xxhash.xxh3_128:
    """The same hash of bytes that come one after the other."""
    return xxhash.xxh3_128()


def digest(data: bytes) -> str:
    """The same hash in hexadecimal, for whole files."""
    return xxhash.xxh3_128_hexdigest(data)
