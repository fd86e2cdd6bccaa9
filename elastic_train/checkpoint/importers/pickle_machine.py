"""The machine behind the pickle format, written so that a file of any bytes costs what its size allows.

Instructions come from a table and are performed one after the other: nothing here calls itself, and nothing
that a file names is looked up, imported or called. What names, calls and references mean is the `World`'s to
say. Containers are Python's own; dictionary keys are short and flat, so that hashing one takes no time.
"""

from __future__ import annotations

import codecs
import struct
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

from elastic_train.errors import ChecksumMismatch, FormatUnsupported

FLOOR, FACTOR = 32 << 20, 64
"""Bytes of memory that any pickle may take, and as many more for each of its own."""
SET, ENTRY, OBJECT = 216, 100, 160
"""Bytes of memory that sets, their items and objects take; what other instructions make is below FACTOR."""
INTEGER, DIGITS = 1024, 2500
"""Bytes and digits of the longest integer."""
WIDTH = 32
"""Elements of the longest tuple that may be a key."""
_FLAT = (str, bytes, int, float, type(None))
_NEWEST = 5


class World(Protocol):
    """What the instructions that reach out of the pickle stand for."""

    def named(self, module: str, name: str) -> object:
        """What takes the place of `module.name`."""
        ...

    def call(self, function: object, arguments: tuple[Any, ...]) -> object:
        """What a call of something that was named makes."""
        ...

    def fill(self, value: object, state: object) -> None:
        """Give the state to what a call made."""
        ...

    def add(self, value: object, items: list[Any]) -> None:
        """Give items (of a mapping: keys and values in turn) to what a call made."""
        ...

    def reference(self, pid: object) -> object:
        """What a reference to something outside of the pickle stands for."""
        ...


class Machine:
    """One run over one pickle."""

    def __init__(self, data: bytes, world: World, *, url: str) -> None:
        self._data, self._world, self._url = data, world, url
        self._at = 0
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []  # what lies under each mark
        self._memo: dict[int, Any] = {}
        self._left = FLOOR + FACTOR * len(data)

    def load(self) -> Any:
        """The value; ChecksumMismatch where the bytes are no pickle, FormatUnsupported where it asks for more
        than a file of its size may.
        """
        data, memo, stack, at = self._data, self._memo, self._stack, 0
        try:
            while (code := data[at]) != _STOP:
                at += 1
                if code == _BINPUT:
                    memo[data[at]] = stack[-1]
                    at += 1
                elif code == _LONG_BINPUT:
                    number = int.from_bytes(data[at : at + 4], "little")
                    if number > len(data):
                        self._bad(f"place {number} of the memo, more than there are bytes")
                    memo[number] = stack[-1]
                    at += 4
                elif code == _BINGET:
                    stack.append(memo[data[at]])
                    at += 1
                elif code == _LONG_BINGET:
                    stack.append(memo[int.from_bytes(data[at : at + 4], "little")])
                    at += 4
                elif code == _BININT1:
                    stack.append(data[at])
                    at += 1
                elif code == _MARK:
                    self._below.append(stack)
                    stack = []
                elif code == _TUPLE:
                    made = tuple(stack)
                    stack = self._below.pop()
                    stack.append(made)
                else:
                    self._at, self._stack = at, stack
                    _TABLE[code](self)
                    at, stack = self._at, self._stack
            self._at, self._stack = at, stack
            (value,) = self._stack
        except (IndexError, KeyError, UnicodeDecodeError, struct.error, ValueError, TypeError) as error:
            raise self._damage(f"at byte {self._at} of it ({type(error).__name__}: {error})") from error
        if self._below or self._at + 1 != len(self._data):
            raise self._damage(f"it ends at byte {self._at + 1} of {len(self._data)}")
        return value

    # what instructions are made of

    def _damage(self, what: str) -> ChecksumMismatch:
        return ChecksumMismatch(url=self._url, problem=f"its index is damaged: {what}. Copy the file again.")

    def _bad(self, what: str) -> NoReturn:
        raise self._damage(f"{what}, at byte {self._at} of it")

    def _spend(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise FormatUnsupported(
                url=self._url,
                problem=f"its index of {len(self._data)} bytes asks for more memory than its size allows.",
            )

    def _take(self, length: int) -> bytes:
        found = self._data[self._at : self._at + length]
        if length < 0 or len(found) != length:
            self._bad(f"{length} bytes should follow and {len(found)} do")
        self._at += length
        return found

    def _number(self, size: int, *, signed: bool = False) -> int:
        return int.from_bytes(self._take(size), "little", signed=signed)

    def _line(self) -> bytes:
        end = self._data.index(b"\n", self._at)
        line = self._data[self._at : end]
        self._at = end + 1
        return line

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _marked(self) -> list[Any]:
        """What was pushed since the last mark, which goes."""
        items = self._stack
        self._stack = self._below.pop()
        return items

    def _integer(self, size: int) -> int:
        if size > INTEGER:
            self._bad(f"an integer of {size} bytes")
        return self._number(size, signed=True)

    def _decimal(self, text: bytes) -> int:
        if len(text) > DIGITS:
            self._bad(f"an integer of {len(text)} digits")
        return int(text)

    def _check_key(self, key: Any) -> None:
        if not isinstance(key, _FLAT):
            flat = isinstance(key, tuple) and len(key) <= WIDTH and all(isinstance(k, _FLAT) for k in key)
            if not flat and type(key).__hash__ is not object.__hash__:
                self._bad(f"a {type(key).__name__} as a key")

    def _set_items(self, target: Any, items: list[Any]) -> None:
        if len(items) % 2:
            self._bad("a key without a value")
        if type(target) is not dict:
            self._world.add(target, items)
            return
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) is not str:
                self._check_key(key)
            if key in target:
                self._bad(f"the key {key!r:.80} comes twice")
            target[key] = value

    def _append(self, target: Any, items: list[Any]) -> None:
        if type(target) is list:
            target.extend(items)
        else:
            self._world.add(target, items)

    def _set_of(self, items: list[Any]) -> set[Any]:
        for item in items:
            self._check_key(item)
        self._spend(SET + ENTRY * len(items))
        return set(items)

    # instructions

    def proto(self) -> None:
        if (version := self._number(1)) > _NEWEST:
            self._bad(f"protocol {version}")

    def frame(self) -> None:
        if self._number(8) > len(self._data) - self._at:
            self._bad("a frame reaches over the end")

    def pop(self) -> None:
        if self._stack:
            self._stack.pop()
        else:
            self._marked()

    def pop_mark(self) -> None:
        self._marked()

    def dup(self) -> None:
        self._push(self._stack[-1])

    def text_int(self) -> None:
        line = self._line()
        self._push(line == b"01" if line in (b"00", b"01") else self._decimal(line))

    def text_string(self) -> None:
        line = self._line()
        if len(line) < 2 or line[0] != line[-1] or line[:1] not in (b"'", b'"'):
            self._bad("a text without quotes")
        self._push(codecs.decode(line[1:-1], "unicode_escape"))

    def text_unicode(self) -> None:
        self._push(self._line().decode("raw-unicode-escape").encode().decode())

    def empty_set(self) -> None:
        self._spend(SET)
        self._push(set())

    def list_of(self) -> None:
        items = self._marked()
        self._push(items)

    def dict_of(self) -> None:
        items = self._marked()
        self._push({})
        self._set_items(self._stack[-1], items)

    def tuple_last(self, count: int) -> None:
        if len(self._stack) < count:
            self._bad("a tuple of what isn't there")
        self._stack[-count:] = [tuple(self._stack[-count:])]

    def frozen(self) -> None:
        self._push(frozenset(self._set_of(self._marked())))

    def append(self) -> None:
        item = self._stack.pop()
        self._append(self._stack[-1], [item])

    def appends(self) -> None:
        items = self._marked()
        self._append(self._stack[-1], items)

    def set_item(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._set_items(self._stack[-1], [key, value])

    def set_items(self) -> None:
        items = self._marked()
        self._set_items(self._stack[-1], items)

    def add_items(self) -> None:
        items = self._marked()
        target = self._stack[-1]
        if type(target) is set:
            target |= self._set_of(items)
        else:
            self._world.add(target, items)

    def put(self, number: int) -> None:
        if not 0 <= number <= len(self._data):
            self._bad(f"place {number} of the memo, more than there are bytes")
        self._memo[number] = self._stack[-1]

    def memoize(self) -> None:
        self.put(len(self._memo))

    def named(self) -> None:
        module = self._line().decode()
        self._named(module, self._line().decode())

    def named_on_stack(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        self._named(module, name)

    def _named(self, module: Any, name: Any) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            self._bad("a name that is no text")
        self._spend(OBJECT)
        self._push(self._world.named(module, name))

    def reduce(self) -> None:
        arguments, function = self._stack.pop(), self._stack.pop()
        self._call(function, arguments)

    def new_with_names(self) -> None:
        words = self._stack.pop()
        if words:
            self._bad("a call with named arguments")
        self.reduce()

    def inst(self) -> None:
        self.named()
        function = self._stack.pop()
        self._call(function, tuple(self._marked()))

    def obj(self) -> None:
        function, *arguments = self._marked()
        self._call(function, tuple(arguments))

    def _call(self, function: Any, arguments: Any) -> None:
        if not isinstance(arguments, tuple):
            self._bad("a call without arguments")
        self._spend(OBJECT)
        self._push(self._world.call(function, arguments))

    def build(self) -> None:
        state = self._stack.pop()
        self._world.fill(self._stack[-1], state)

    def reference(self) -> None:
        self._spend(OBJECT)
        self._push(self._world.reference(self._stack.pop()))

    def raw(self, size: int) -> None:
        self._push(self._take(self._number(size)))

    def text(self, size: int) -> None:
        start = self._at + size
        self._at = start + int.from_bytes(self._data[self._at : start], "little")
        if self._at > len(self._data):
            self._bad("a text reaches over the end")
        self._stack.append(self._data[start : self._at].decode())


Operation = Callable[[Machine], None]
_STOP, _MARK, _TUPLE, _BININT1 = ord("."), ord("("), ord("t"), ord("K")
_BINPUT, _LONG_BINPUT, _BINGET, _LONG_BINGET = ord("q"), ord("r"), ord("h"), ord("j")
_TABLE: dict[int, Operation] = {
    0x80: Machine.proto,
    0x95: Machine.frame,
    ord("0"): Machine.pop,
    ord("1"): Machine.pop_mark,
    ord("2"): Machine.dup,
    ord("I"): Machine.text_int,
    ord("L"): lambda m: m._push(m._decimal(m._line().removesuffix(b"L"))),
    ord("F"): lambda m: m._push(float(m._line())),
    ord("S"): Machine.text_string,
    ord("V"): Machine.text_unicode,
    ord("G"): lambda m: m._push(struct.unpack(">d", m._take(8))[0]),
    ord("N"): lambda m: m._push(None),
    0x88: lambda m: m._push(True),
    0x89: lambda m: m._push(False),
    ord("M"): lambda m: m._push(m._number(2)),
    ord("J"): lambda m: m._push(m._number(4, signed=True)),
    0x8A: lambda m: m._push(m._integer(m._number(1))),
    0x8B: lambda m: m._push(m._integer(m._number(4))),
    ord("U"): lambda m: m._push(m._take(m._number(1)).decode("latin1")),
    ord("T"): lambda m: m._push(m._take(m._number(4)).decode("latin1")),
    ord("C"): lambda m: m.raw(1),
    ord("B"): lambda m: m.raw(4),
    0x8E: lambda m: m.raw(8),
    0x96: lambda m: m.raw(8),
    0x8C: lambda m: m.text(1),
    ord("X"): lambda m: m.text(4),
    0x8D: lambda m: m.text(8),
    ord("]"): lambda m: m._push([]),
    ord("}"): lambda m: m._push({}),
    0x8F: Machine.empty_set,
    ord(")"): lambda m: m._push(()),
    ord("l"): Machine.list_of,
    ord("d"): Machine.dict_of,
    0x85: lambda m: m.tuple_last(1),
    0x86: lambda m: m.tuple_last(2),
    0x87: lambda m: m.tuple_last(3),
    0x91: Machine.frozen,
    ord("a"): Machine.append,
    ord("e"): Machine.appends,
    ord("s"): Machine.set_item,
    ord("u"): Machine.set_items,
    0x90: Machine.add_items,
    ord("p"): lambda m: m.put(m._decimal(m._line())),
    0x94: Machine.memoize,
    ord("g"): lambda m: m._push(m._memo[m._decimal(m._line())]),
    ord("c"): Machine.named,
    0x93: Machine.named_on_stack,
    ord("R"): Machine.reduce,
    0x81: Machine.reduce,
    0x92: Machine.new_with_names,
    ord("i"): Machine.inst,
    ord("o"): Machine.obj,
    ord("b"): Machine.build,
    ord("Q"): Machine.reference,
}
"""Every other instruction that may come, by its byte. Extensions and buffers out of band may not."""
