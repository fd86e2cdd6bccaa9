"""A pickle of any bytes costs what its size allows, and is read or refused with a typed error."""

from __future__ import annotations

import pickle
import random
import resource
import struct
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_train.checkpoint.importers.pickle_free import Opaque, unpickle
from elastic_train.checkpoint.reader import open_checkpoint
from elastic_train.errors import ChecksumMismatch, FormatUnsupported

pytestmark = pytest.mark.ring1

BUDGET = 256 << 20


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def levels(open_: bytes, close: bytes, count: int, width: int) -> bytes:
    """Containers that each hold the one before `width` times."""
    made = text("x") + b"q\x000"
    for level in range(1, count + 1):
        made += open_ + (b"h" + bytes([level - 1])) * width + close + b"q" + bytes([level]) + b"0"
    return made + b"h" + bytes([count])


def tensor(shape: bytes, strides: bytes, *, offset: bytes = b"K\x00", after: bytes = b"") -> bytes:
    storage = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + b"K\x10tQ"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + offset + shape + strides + b"\x89NtR" + after


ONES = b"(" + b"K\x01" * 1000 + b"t"
OF_TYPE = b"ctorch._tensor\n_rebuild_from_type_v2\nq\x01"
LONG = b"\x8a\x09" + (2**70).to_bytes(9, "little")
HOSTILE = {
    "a memo of 2^28 places": b"\x80\x02}r\x00\x00\x00\x10.",
    "a memo of negative places": b"\x80\x02}p-5\n.",
    "2^40 bytes that aren't there": b"\x80\x05\x96" + struct.pack("<Q", 2**40) + b".",
    "2^60 characters that aren't there": b"\x80\x04\x8d" + struct.pack("<Q", 2**60) + b".",
    "lists of lists of one list": b"\x80\x02" + levels(b"](", b"e", 30, 10) + b".",
    "tuples of tuples of one tuple": b"\x80\x02" + levels(b"(", b"t", 40, 2) + b".",
    "nested tuples as a key": b"\x80\x02}(" + levels(b"(", b"t", 40, 2) + text("v") + b"u.",
    "a call of itself": b"\x80\x02ctorch.serialization\n_get_layout\nq\x01(h\x01)}NtbK\x05\x85R.",
    "a tensor class of itself": b"\x80\x02" + OF_TYPE + b"(h\x01N]q\x02tq\x030h\x01h\x01h\x03\x86R.",
    "a state for a tensor": b"\x80\x02" + tensor(b"K\x08\x85", b"K\x01\x85", after=b"(K\x00K\x01tb") + b".",
    "a size beyond 64 bits": b"\x80\x02" + tensor(LONG + b"\x85", b"K\x00\x85") + b".",
    "a thousand dims": b"\x80\x02" + tensor(ONES, ONES) + b".",
    "a size that is no integer": b"\x80\x02" + tensor(b"F1.5\n\x85", b"F1.0\n\x85") + b".",
    "a list as a shape": b"\x80\x02" + tensor(b"]", b"]") + b".",
    "a million lists in one another": b"\x80\x02" + b"]" * 1_000_000 + b"a" * 999_999 + b".",
    "a dictionary in itself": b"\x80\x02}q\x00(" + text("me") + b"h\x00u.",
    "one key twice": b"\x80\x02}(" + (text("w") + b"K\x01") * 2 + b"u.",
    "an integer of a million digits": b"I" + b"9" * 1_000_000 + b"\n.",
    "an integer of a million bytes": b"\x80\x02\x8b" + struct.pack("<i", 2**20) + b"\x01" * 2**20 + b".",
    "two million sets": b"\x80\x04" + b"\x8f" * 2_000_000 + b".",
    "an extension": b"\x80\x02\x82\x01.",
    "a buffer from elsewhere": b"\x80\x05\x97.",
    "bytes after the end": b"\x80\x02K\x01.K\x02.",
    "two values": b"\x80\x02K\x01K\x02.",
    "no value": b"\x80\x02.",
    "a text that isn't UTF-8": b"\x80\x02X\x03\x00\x00\x00\xed\xa0\x80.",
    "a class that gets a state": b"\x80\x02ctorch\nTensor\n}(" + text("get") + b"K\x01ub.",
    "a dictionary with attributes": b"\x80\x02}}(" + text("get") + b"K\x01ub.",
    "the globals of a function": b"\x80\x04" + text("torch._utils") + text("_tensor.__globals__") + b"\x93.",
}  # fmt: skip


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_pickles_are_refused_within_the_budget(data: bytes) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises((ChecksumMismatch, FormatUnsupported)):
        unpickle(data, url="x")
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < BUDGET


ATOMS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
KEYS = st.text() | st.integers(-(2**40), 2**40) | st.tuples(st.text(), st.integers(0, 9))
VALUES = st.recursive(
    ATOMS,
    lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner) | st.tuples(inner, inner),
    max_leaves=30,
)


@settings(max_examples=100, deadline=None)
@given(value=VALUES, protocol=st.integers(0, 5))
def test_what_was_pickled_comes_back_equal(value: Any, protocol: int) -> None:
    assert unpickle(pickle.dumps(value, protocol=protocol), url="x") == value


def test_changed_pickles_are_read_or_refused() -> None:
    chance = random.Random(5)
    value = {"a": [1, 2.5, None, "ü", 2**70], "b": (b"\x00", {3: {4}}), "c": OrderedDict(x=Settings())}
    goods = [pickle.dumps(value, protocol=protocol) for protocol in range(6)]
    refused = 0
    for _ in range(1500):
        data = bytearray(chance.choice(goods))
        for _ in range(chance.randint(1, 3)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        try:
            unpickle(bytes(data), url="x")
        except (ChecksumMismatch, FormatUnsupported):
            refused += 1
    assert refused > 500


def test_containers_of_the_library_become_plain_ones() -> None:
    counts = defaultdict(int, {"a": 1})
    found = unpickle(pickle.dumps({"c": counts, "s": {1, 2}, "f": frozenset("x"), "z": 1 + 2j}), url="x")
    assert found == {"c": {"a": 1}, "s": {1, 2}, "f": frozenset("x"), "z": 1 + 2j}


class Settings:
    """A class of a job."""

    def __init__(self) -> None:
        self.width = 4


def test_objects_of_a_job_are_words(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.zeros(2)}, "settings": Settings(), "kind": Settings}, tmp_path / "x.pt")
    lost = open_checkpoint(str(tmp_path / "x.pt")).document["foreign"]["not_restored"]
    assert any(line.startswith("settings: a ") and line.endswith("Settings") for line in lost)
    found = unpickle(pickle.dumps(Settings()), url="x")
    assert isinstance(found, Opaque)
    assert found.state is None
