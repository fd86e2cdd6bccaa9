"""Damage for fuzzers: random changes of bytes, and of values in JSON."""

from __future__ import annotations

import copy
import json
import os
import random
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

INTS = (-1, 0, 1, 2, 3, 63, 2**31 - 1, 2**31, 2**32, 2**40, 2**45, 2**62, 2**63 - 1)
TEXTS = ("", ".", "..", "../x", "a/../../x", "/", "\0", "\x1b[2J", "x" * 70_000, "ü", "__gap__", "param", "w")
VALUES: tuple[Any, ...] = (
    None, True, False, -1, 0, 7, 2**63, 2**200, 1.5, 1e308, "", "x", [], {}, [[]], [1], ["x"], {"a": 1},
    {"$map": 5}, {"$map": [[[], 1]]}, {"$tuple": "ab"}, {"$float": "1"}, {"$bytes": 5}, {"$bytes": "?"},
)  # fmt: skip


NESTED = "lists inside each other: "


def json_bytes(value: Any) -> bytes:
    """JSON of a value, in which texts of NESTED become so many lists inside each other."""
    text = json.dumps(value)
    return re.sub(f'"{NESTED}([0-9]+)"', lambda m: "[" * int(m[1]) + "]" * int(m[1]), text).encode()


def damaged(data: bytes, chance: random.Random, others: Sequence[bytes]) -> tuple[bytes, str]:
    """The bytes with something flipped, set, removed or put in, more often near their ends."""
    if not data:
        return b"\0", "a byte in an empty file"
    made = bytearray(data)
    size = len(made)
    at = chance.choice(
        [
            chance.randrange(size),
            chance.randrange(min(size, 2048)),
            max(0, size - 1 - chance.randrange(min(size, 4096))),
        ]
    )
    match chance.randrange(7):
        case 0 | 1:
            made[at] ^= 1 << chance.randrange(8)
            what = "a bit flipped"
        case 2:
            made[at] = chance.choice([0, 1, 0x7F, 0x80, 0xFF])
            what = "a byte set"
        case 3:
            del made[at:]
            what = "cut off"
        case 4:
            del made[at : at + chance.randrange(1, 64)]
            what = "some bytes removed"
        case 5:
            other = chance.choice(others)
            start = chance.randrange(max(1, len(other)))
            piece = other[start : start + chance.choice([4, 16, 64, 512])]
            made[at:at] = piece
            what = "some bytes put in"
        case _:
            wide = chance.choice([4, 8])
            made[at : at + wide] = chance.choice(
                [b"\xff" * wide, bytes(wide), b"\xff" * (wide - 1) + b"\x7f"]
            )
            what = "a number set"
    return bytes(made), f"{what} at byte {at} of {size}"


def other_json(value: Any, chance: random.Random) -> tuple[Any, str]:
    """The value with one place of it replaced, removed, or doubled; for `json_bytes`."""
    made = copy.deepcopy(value)
    places = list(_places(made, ()))
    place = chance.choice(places)
    holder = made
    for key in place[:-1]:
        holder = holder[key]
    last = place[-1]
    match chance.randrange(6):
        case 0:
            del holder[last]
            what = "removed"
        case 1:
            holder[last] = f"{NESTED}{chance.choice([10, 100, 5000])}"
            what = "nested"
        case 2 if isinstance(holder, list):
            holder.append(copy.deepcopy(holder[last]))
            what = "doubled"
        case 3:
            other = made
            for key in chance.choice(places):
                other = other[key]
            holder[last] = copy.deepcopy(other)
            what = "another's"
        case _:
            holder[last] = copy.deepcopy(chance.choice((*VALUES, *INTS, *TEXTS)))
            what = f"{holder[last]!r:.60}"
    return made, f"{'.'.join(map(str, place))} {what}"


def _places(value: Any, at: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    found = [at] if at else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        found += _places(item, (*at, key))
    return found


def other_file(path: Path, chance: random.Random, secret: Path) -> str:
    """Something else in place of a file: nothing, a link, a pipe, a directory."""
    path.unlink()
    match chance.randrange(6):
        case 0:
            return "gone"
        case 1:
            path.write_bytes(b"")
            return "empty"
        case 2:
            path.symlink_to(secret)
            return "a link to a file outside"
        case 3:
            os.mkfifo(path)
            return "a pipe"
        case 4:
            path.symlink_to(path.name)
            return "a link to itself"
        case _:
            path.mkdir()
            shutil.copy(secret, path / "x")
            return "a directory"
