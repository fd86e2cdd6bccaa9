"""Pickles with one thing in them changed by somebody who knows what they are: numbers, names, memo, nesting.

Nothing here is ever unpickled; the instructions are those of pickletools.
"""

from __future__ import annotations

import pickletools
import random
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from elastic_train.testing.damage import INTS, TEXTS

INSTRUCTIONS = (
    b"()]}0NJKMTUXBC\x85\x86\x87\x88\x89tRbdesuahijqrlopQcI.\x80\x81\x82\x8a\x8b\x8c\x8e\x8f\x90\x91\x92\x93"
    b"\x94\x95\x96\x97\x98G2"
)
"""The first bytes of a pickle's instructions."""
NUMBERS = frozenset({"BININT", "BININT1", "BININT2", "LONG1", "LONG4", "INT", "LONG"})
WORDS = frozenset({"BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "UNICODE"})
GETS = frozenset({"BINGET", "LONG_BINGET", "GET"})
PUTS = frozenset({"BINPUT", "LONG_BINPUT", "PUT"})
GLOBALS = (
    "os system", "builtins eval", "builtins getattr", "collections OrderedDict",
    "torch.storage UntypedStorage",
    "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter", "torch FloatStorage", "torch Size",
    "torch._tensor _rebuild_from_type_v2", "nowhere Nothing", "builtins list", "builtins set",
)  # fmt: skip
DEEP = (50, 1000, 100_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    name: str
    argument: object
    data: bytes


def other_pickle(data: bytes, chance: random.Random) -> tuple[bytes, str]:
    """The pickle with one to three places changed."""
    said: list[str] = []
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        change = chance.choice([_other_bytes, _other_number, _other_number, _other_word, _other_memo, _more])
        data, what = change(data, chance)
        said.append(what)
    return data, " and ".join(said)


def instructions(data: bytes) -> list[Instruction]:
    """A pickle's instructions without its frames, whose lengths no longer hold; those before what can't be
    read.
    """
    found: list[Instruction] = []
    places: list[tuple[str, object, int]] = []
    with suppress(ValueError, IndexError, struct.error, UnicodeError, AttributeError, MemoryError):
        for code, argument, at in pickletools.genops(data):
            places.append((code.name, argument, at or 0))
    ends = [at for _, _, at in places[1:]] + [len(data)]
    for (name, argument, at), end in zip(places, ends, strict=True):
        if name != "FRAME":
            found.append(Instruction(name=name, argument=argument, data=data[at:end]))
    return found


def _replaced(
    data: bytes, chance: random.Random, names: frozenset[str], new: Callable[[Instruction], tuple[bytes, str]]
) -> tuple[bytes, str]:
    found = instructions(data)
    places = [n for n, one in enumerate(found) if one.name in names]
    if not places:
        return _other_bytes(data, chance)
    at = chance.choice(places)
    made, what = new(found[at])
    parts = [one.data for one in found]
    parts[at] = made
    return b"".join(parts), f"{found[at].name} {found[at].argument!r:.40} is {what}"


def _other_number(data: bytes, chance: random.Random) -> tuple[bytes, str]:
    def new(one: Instruction) -> tuple[bytes, str]:
        held = one.argument if isinstance(one.argument, int) else 0
        near = (held + 1, held - 1, -held, held * 2, -1, 2**31, 2**64, 2**200, -(2**63), 10**5000)
        value = chance.choice([*INTS, *near])
        return integer(value), f"{value!r:.40}" if abs(value) < 10**100 else "a number of 5,001 digits"

    return _replaced(data, chance, NUMBERS, new)


def _other_word(data: bytes, chance: random.Random) -> tuple[bytes, str]:
    words = [str(one.argument) for one in instructions(data) if one.name in WORDS]

    def new(one: Instruction) -> tuple[bytes, str]:
        value = chance.choice([*TEXTS, *words, *words, f"{one.argument}.", f"_orig_mod.{one.argument}"])
        return text(value), repr(value)[:40]

    return _replaced(data, chance, WORDS, new)


def _other_memo(data: bytes, chance: random.Random) -> tuple[bytes, str]:
    def new(one: Instruction) -> tuple[bytes, str]:
        value = chance.choice([0, 1, 2, 3, 5, 8, 2**16, 2**28, 2**32 - 1])
        code = b"j" if one.name in GETS else b"r"
        return code + struct.pack("<I", value), f"{value} of the memo"

    if chance.randrange(3):
        return _replaced(data, chance, GETS | PUTS, new)

    def named(one: Instruction) -> tuple[bytes, str]:
        name = chance.choice(GLOBALS)
        module, _, attribute = name.partition(" ")
        old = f"c{module}\n{attribute}\n".encode()
        return old if one.name == "GLOBAL" else b"00" + old, name

    return _replaced(data, chance, frozenset({"GLOBAL", "STACK_GLOBAL"}), named)


def _more(data: bytes, chance: random.Random) -> tuple[bytes, str]:
    """An entry more of the outermost mapping, or the whole inside of something."""
    value, what = chance.choice(_VALUES)(chance)
    stop = data.rfind(b".")
    head = data[:stop] if stop >= 0 else data
    name = chance.choice(["model", "optimizer", "state_dict", "step", "x"])
    match chance.randrange(3):
        case 0:
            return head + text(name) + value + b"s.", f"{name} is {what}"
        case 1:
            return head + b"\x85" + text(name) + value + b"\x87.", f"the whole is beside {what}"
        case _:
            return head + value + text(name) + b"s.", f"{what} is a key"


def _nested_lists(chance: random.Random) -> tuple[bytes, str]:
    deep = chance.choice(DEEP)
    return b"]" * deep + b"a" * (deep - 1), f"{deep} lists inside each other"


def _nested_tuples(chance: random.Random) -> tuple[bytes, str]:
    deep = chance.choice(DEEP)
    return b")" + b"\x85" * deep, f"{deep} tuples inside each other"


def _shared_lists(chance: random.Random) -> tuple[bytes, str]:
    """A list that holds the one before it twice, and so on: 2^n lists, walked as a tree."""
    deep = chance.choice((10, 30, 200))
    parts = [b"]r" + struct.pack("<I", 10_000)]
    for at in range(10_000, 10_000 + deep):
        get = b"j" + struct.pack("<I", at)
        parts.append(b"](" + get + get + b"er" + struct.pack("<I", at + 1))
    return b"".join(parts), f"lists that share lists {deep} times"


def _endless_list(chance: random.Random) -> tuple[bytes, str]:
    get = struct.pack("<I", 20_000)
    return b"]r" + get + b"j" + get + b"a", "a list that holds itself"


def _endless_mapping(chance: random.Random) -> tuple[bytes, str]:
    get = struct.pack("<I", 20_000)
    return b"}r" + get + text("self") + b"j" + get + b"s", "a mapping that holds itself"


def _called(chance: random.Random) -> tuple[bytes, str]:
    module, _, attribute = chance.choice(GLOBALS).partition(" ")
    return f"c{module}\n{attribute}\n".encode() + b"(" + text("x") + b"tR", f"{module}.{attribute}('x')"


def _tensor_again(chance: random.Random) -> tuple[bytes, str]:
    """A storage that no file has, or one that another has too, seen as a tensor of odd numbers."""
    key = chance.choice(["0", "1", "99", "../0", "-1"])
    numel, offset, size, stride = (chance.choice([0, 1, 2, 4, 12, 2**40, -1, 2**62]) for _ in range(4))
    made = b"ctorch._utils\n_rebuild_tensor_v2\n((" + text("storage") + b"ctorch\nFloatStorage\n"
    made += text(key) + text("cpu") + integer(numel) + b"tQ"
    made += (
        integer(offset)
        + integer(size)
        + b"\x85"
        + integer(stride)
        + b"\x85\x89ccollections\nOrderedDict\n)RtR"
    )
    return made, f"a tensor of {size} at {offset} by {stride} in storage {key} of {numel}"


_VALUES: tuple[Callable[[random.Random], tuple[bytes, str]], ...] = (
    _nested_lists, _nested_tuples, _shared_lists, _endless_list, _endless_mapping, _called, _tensor_again,
    _tensor_again,
)  # fmt: skip


def _other_bytes(data: bytes, chance: random.Random) -> tuple[bytes, str]:
    """Instructions changed, put in, removed or repeated, and numbers set, wherever that is."""
    made = bytearray(data or b".")
    at = chance.randrange(len(made))
    match chance.randrange(6):
        case 0:
            made[at] = chance.choice(INSTRUCTIONS)
            what = "another instruction"
        case 1:
            made[at] ^= 1 << chance.randrange(8)
            what = "a bit flipped"
        case 2:
            made[at:at] = bytes([chance.choice(INSTRUCTIONS)])
            what = "one more instruction"
        case 3:
            del made[at : at + chance.randrange(1, 12)]
            what = "instructions removed"
        case 4:
            start = chance.randrange(len(made))
            made[at:at] = made[start : start + chance.randrange(1, 40)]
            what = "instructions repeated"
        case _:
            made[at : at + 4] = struct.pack("<i", chance.choice([-1, -(2**31), 2**31 - 1, 0, 1, 7]))
            what = "a number set"
    return bytes(made), f"{what} at byte {at}"


def integer(value: int) -> bytes:
    """A number of any size as an instruction."""
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return (
        b"\x8a" + bytes([len(data)]) + data
        if len(data) < 256
        else b"\x8b" + struct.pack("<i", len(data)) + data
    )


def text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data
