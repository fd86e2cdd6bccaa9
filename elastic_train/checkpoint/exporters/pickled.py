"""Pickles of plain values and of tensors' descriptions, written without the classes that they name.

Protocol 2, as torch writes it. What is written names constructors; nothing here runs any.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elastic_train.checkpoint.dtypes import ELEMENTS

_STORAGES = {
    "float64": "DoubleStorage",
    "float32": "FloatStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "int64": "LongStorage",
    "int32": "IntStorage",
    "int16": "ShortStorage",
    "int8": "CharStorage",
    "uint8": "ByteStorage",
    "bool": "BoolStorage",
    "complex64": "ComplexFloatStorage",
}
"""Other dtypes are views of untyped storages."""


@dataclass(frozen=True, slots=True)
class Global:
    """Something by its module and name."""

    module: str
    name: str


@dataclass(frozen=True, slots=True)
class PickledCall:
    """What a callable returns for arguments."""

    function: Global
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Instance:
    """An object of a class, made without its `__init__`, with a state."""

    kind: Global
    state: Any


@dataclass(frozen=True, slots=True)
class Ordered:
    """An OrderedDict."""

    items: Mapping[Any, Any]


@dataclass(frozen=True, slots=True)
class Pairs:
    """A dict by its items, whose keys may be anything."""

    items: Sequence[tuple[Any, Any]]


@dataclass(frozen=True, slots=True)
class Tensor:
    """A row-major tensor whose bytes are the storage `key`."""

    key: str
    dtype: str
    shape: tuple[int, ...]


def size(shape: tuple[int, ...]) -> PickledCall:
    """A torch.Size."""
    return PickledCall(Global("torch", "Size"), (tuple(shape),))


def pickled(value: Any) -> bytes:
    """The pickle of a value; TypeError for what has none here."""
    out = bytearray(b"\x80\x02")
    _write(value, out)
    return bytes(out + b".")


def _write(value: Any, out: bytearray) -> None:
    match value:
        case None:
            out += b"N"
        case bool():
            out += b"\x88" if value else b"\x89"
        case int():
            _write_int(value, out)
        case float():
            out += b"G" + struct.pack(">d", value)
        case str():
            data = value.encode("utf-8", "surrogatepass")
            out += b"X" + struct.pack("<I", len(data)) + data
        case bytes():
            _write(PickledCall(Global("_codecs", "encode"), (value.decode("latin1"), "latin1")), out)
        case tuple():
            _write_tuple(value, out)
        case list():
            out += b"]("
            for item in value:
                _write(item, out)
            out += b"e"
        case Mapping():
            _write_items(b"}", value.items(), out)
        case Pairs():
            _write_items(b"}", value.items, out)
        case Global():
            out += f"c{value.module}\n{value.name}\n".encode()
        case PickledCall():
            _write(value.function, out)
            _write_tuple(value.arguments, out)
            out += b"R"
        case Instance():
            _write(value.kind, out)
            out += b")\x81"
            _write(value.state, out)
            out += b"b"
        case Ordered():
            _write(PickledCall(Global("collections", "OrderedDict")), out)
            _write_items(b"", value.items.items(), out)
        case Tensor():
            _write_tensor(value, out)
        case _:
            raise TypeError(f"a {type(value).__name__} can't be written")


def _write_int(value: int, out: bytearray) -> None:
    if -(1 << 31) <= value < 1 << 31:
        out += b"J" + struct.pack("<i", value)
        return
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    if len(data) > 255:
        raise TypeError(f"an integer of {len(data)} bytes can't be written")
    out += b"\x8a" + bytes([len(data)]) + data


def _write_tuple(value: tuple[Any, ...], out: bytearray) -> None:
    out += b"("
    for item in value:
        _write(item, out)
    out += b"t"


def _write_items(start: bytes, items: Iterable[tuple[Any, Any]], out: bytearray) -> None:
    out += start + b"("
    for key, item in items:
        _write(key, out)
        _write(item, out)
    out += b"u"


def _write_tensor(tensor: Tensor, out: bytearray) -> None:
    strides = [1]
    for length in reversed(tensor.shape[1:]):
        strides.insert(0, strides[0] * length)
    numel = 1
    for length in tensor.shape:
        numel *= length
    typed = tensor.dtype in _STORAGES
    kind = Global("torch", _STORAGES[tensor.dtype]) if typed else Global("torch.storage", "UntypedStorage")
    count = numel if typed else numel * ELEMENTS[tensor.dtype].bytes
    _write(Global("torch._utils", "_rebuild_tensor_v2" if typed else "_rebuild_tensor_v3"), out)
    out += b"("
    _write_tuple(("storage", kind, tensor.key, "cpu", count), out)
    out += b"Q"
    for item in (0, tensor.shape, tuple(strides[: len(tensor.shape)]), False):
        _write(item, out)
    _write(PickledCall(Global("collections", "OrderedDict")), out)
    if not typed:
        _write(Global("torch", tensor.dtype), out)
    out += b"tR"
