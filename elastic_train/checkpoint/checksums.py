"""Checksums of a fragment: CRC-32C of each page, so that a part of it can be verified, and a hash of all of
it.
"""

from __future__ import annotations

from collections.abc import Iterator

import crc32c
import xxhash

PAGE = 4 << 20
"""Bytes of a page. A fragment's pages count from its own first byte; the last one may be short."""


def pages(view: memoryview) -> Iterator[memoryview]:
    """The pages of a fragment's bytes."""
    for start in range(0, len(view), PAGE):
        yield view[start : start + PAGE]


def crc(page: memoryview | bytes) -> int:
    """CRC-32C (Castagnoli, RFC 3720) of a page."""
    return crc32c.crc32c(page)


def content_hash(view: memoryview | bytes) -> bytes:
    """XXH3 with 128 bits, seed 0, big-endian: the identity of a fragment's bytes."""
    return xxhash.xxh3_128_digest(view)


def digest(data: bytes) -> str:
    """The same hash in hexadecimal, for whole files."""
    return xxhash.xxh3_128_hexdigest(data)
