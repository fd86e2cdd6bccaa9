"""Zips with one thing in them changed by somebody who knows what they are: sums, places, sizes, names."""

from __future__ import annotations

import io
import random
import struct
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from elastic_train.testing.damage_pickle import other_pickle

WIDE = 0xFFFFFFFF
LATER = 1 << 3
NUMBERS = (0, 1, 30, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**64 - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One file in a zip; what is None is as it should be. `wide`: its numbers are in 64 bits; `later`: its
    sum and sizes follow it; `header`: where the table of contents says that it is.
    """

    name: bytes
    data: bytes
    crc: int | None = None
    size: int | None = None
    header: int | None = None
    own_name: bytes | None = None
    own_size: int | None = None
    method: int = 0
    wide: bool = False
    later: bool = False


def entries_of(data: bytes) -> list[Entry]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return [Entry(name=name.encode(), data=archive.read(name)) for name in archive.namelist()]


def zip_bytes(
    entries: Sequence[Entry], *, before: bytes = b"", comment: bytes = b"", count: int | None = None
) -> bytes:
    """A zip with these entries, whatever they say."""
    made, table = bytearray(before), bytearray()
    for one in entries:
        at = len(made) if one.header is None else one.header
        crc = zlib.crc32(one.data) if one.crc is None else one.crc
        size = len(one.data) if one.size is None else one.size
        own_size = size if one.own_size is None else one.own_size
        own_name = one.name if one.own_name is None else one.own_name
        flags = LATER if one.later else 0
        shown = (0, 0, 0) if one.later else (crc, min(own_size, WIDE), min(own_size, WIDE))
        made += struct.pack("<4s5H3L2H", b"PK\3\4", 0, flags, one.method, 0, 0, *shown, len(own_name), 0)
        made += own_name + one.data
        if one.later:
            made += struct.pack("<4s3L", b"PK\7\x08", crc, min(size, WIDE), min(size, WIDE))
        wide = one.wide or size > WIDE or at > WIDE
        more = (
            struct.pack("<HH3Q", 1, 24, size & (2**64 - 1), size & (2**64 - 1), at & (2**64 - 1))
            if wide
            else b""
        )
        low, place = (WIDE, WIDE) if wide else (size, at)
        table += struct.pack(
            "<4s6H3L5H2L", b"PK\1\2", 0, 0, flags, one.method, 0, 0, crc, low, low, len(one.name), len(more),
            0, 0, 0, 0, place,
        )  # fmt: skip
        table += one.name + more
    number, start = (len(entries) if count is None else count) & 0xFFFF, len(made)
    made += table
    made += struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, number, number, len(table), start, len(comment))
    return bytes(made) + comment


def other_zip(data: bytes, chance: random.Random) -> tuple[bytes, str, bool]:
    """The zip changed, what was, and whether its sums were mended."""
    entries = entries_of(data)
    at, other = chance.randrange(len(entries)), chance.choice(entries)
    one = entries[at]
    name = one.name.decode(errors="replace")[-60:]
    root, sum_of = one.name.partition(b"/")[0], zlib.crc32(one.data)

    def said(new: Entry, what: str, *, mended: bool = True) -> tuple[bytes, str, bool]:
        return zip_bytes([*entries[:at], new, *entries[at + 1 :]]), f"{name} {what}", mended

    changes: list[Callable[[], tuple[bytes, str, bool]]] = [
        lambda: said(replace(one, data=_flipped(one.data, chance), crc=sum_of), "is damaged", mended=False),
        lambda: said(replace(one, data=_flipped(one.data, chance)), "is damaged, its sum mended"),
        lambda: said(replace(one, crc=chance.choice([0, 1, WIDE])), "has another sum"),
        lambda: said(replace(one, wide=True), "has its numbers in 64 bits"),
        lambda: said(replace(one, later=True), "has its sizes behind it"),
        lambda: said(replace(one, size=chance.choice(NUMBERS), wide=True), "has another size in the table"),
        lambda: said(replace(one, own_size=chance.choice(NUMBERS[:5])), "has another size in its header"),
        lambda: said(replace(one, header=chance.choice(NUMBERS), wide=True), "is somewhere else"),
        lambda: said(replace(one, own_name=other.name), f"says that it is {other.name!r:.60}"),
        lambda: said(replace(one, name=_name(root, chance)), "has another name"),
        lambda: said(replace(one, data=other.data), f"has the contents of {other.name!r:.60}"),
        lambda: said(replace(one, data=one.data[: chance.randrange(len(one.data) + 1)]), "is cut off"),
        lambda: said(replace(one, data=one.data + bytes(chance.randrange(1, 9))), "is longer"),
        lambda: said(replace(one, method=chance.choice([8, 12, 99])), "says that it is compressed"),
        lambda: (zip_bytes(entries[:at] + entries[at + 1 :]), f"{name} is gone", True),
        lambda: (zip_bytes([*entries, replace(one, data=other.data)]), f"{name} is there twice", True),
        lambda: (_overlapping(entries, at, chance), f"{name} lies in another entry", True),
        lambda: (zip_bytes(entries, before=bytes(chance.randrange(1, 99))), "bytes before it", True),
        lambda: (zip_bytes(entries, comment=b"PK\5\6" + bytes(18)), "an end in its comment", True),
        lambda: (zip_bytes(entries, count=chance.choice([0, 1, 3, 0xFFFF])), "another count", True),
        lambda: (zip_bytes(entries[::-1]), "the other way round", True),
    ]  # fmt: skip
    return chance.choice(changes)()


def other_pickle_in_zip(data: bytes, chance: random.Random) -> tuple[bytes, str]:
    """A file of torch.save with a changed pickle, its sums mended."""
    entries = entries_of(data)
    at = next((n for n, one in enumerate(entries) if one.name.endswith(b"/data.pkl")), 0)
    made, what = other_pickle(entries[at].data, chance)
    entries[at] = replace(entries[at], data=made)
    return zip_bytes(entries), f"{what} in the pickle"


def _flipped(data: bytes, chance: random.Random) -> bytes:
    made = bytearray(data or b"\0")
    made[chance.randrange(len(made))] ^= 1 << chance.randrange(8)
    return bytes(made)


def _name(root: bytes, chance: random.Random) -> bytes:
    return chance.choice(
        [
            b"../x", b"/x", b"y/data/0", root + b"/data.pkl", root + b"/data/0", root + b"/../../data/0",
            b"\xff", b"\0", b"x" * 60_000, root + b"/", b"",
        ]
    )  # fmt: skip


def _overlapping(entries: Sequence[Entry], at: int, chance: random.Random) -> bytes:
    """An entry of the same name whose header lies in the contents of another."""
    inner = zip_bytes([entries[at]])
    rest = [e for n, e in enumerate(entries) if n != at] or list(entries)
    host = chance.choice(rest)
    made = [replace(e, data=e.data + inner) if e is host else e for e in rest]
    where = zip_bytes(made).find(inner)
    return zip_bytes([*made, replace(entries[at], header=max(0, where))])
