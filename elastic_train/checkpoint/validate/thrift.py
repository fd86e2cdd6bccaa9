"""Thrift's compact encoding, as Parquet's footers and page headers have it, read without believing a length.

Structs become mappings by field number. https://github.com/apache/thrift/blob/master/doc/specs/
"""

from __future__ import annotations

import struct
from typing import Any

MOST_DEEP = 16
TRUE, FALSE, BYTE, I16, I32, I64, DOUBLE, BINARY, LIST, SET, MAP, STRUCT = range(1, 13)


class Reader:
    """Reads values from `at` on; ValueError or IndexError where the bytes are no such values."""

    def __init__(self, data: bytes | memoryview, at: int = 0) -> None:
        self._data, self.at = data, at

    def struct(self, depth: int = 0) -> dict[int, Any]:
        if depth > MOST_DEEP:
            raise ValueError("structs too deep inside each other")
        found: dict[int, Any] = {}
        field = 0
        while head := self._byte():
            field = field + (head >> 4) if head >> 4 else self._signed()
            kind = head & 15
            found[field] = kind == TRUE if kind <= FALSE else self._value(kind, depth)
        return found

    def _value(self, kind: int, depth: int) -> Any:
        match kind:
            case _ if I16 <= kind <= I64:
                return self._signed()
            case _ if kind == BINARY:
                return self._take(self._unsigned())
            case _ if kind == STRUCT:
                return self.struct(depth + 1)
            case _ if kind in (LIST, SET):
                head = self._byte()
                size, inner = head >> 4, head & 15
                return self._values(self._unsigned() if size == 15 else size, inner, depth + 1)
            case _ if kind == BYTE:
                return self._byte()
            case _ if kind == DOUBLE:
                return struct.unpack("<d", self._take(8))[0]
            case _ if kind == MAP:
                size = self._unsigned()
                kinds = self._byte() if size else 0
                keys = [self._pair(kinds, depth + 1) for _ in range(self._possible(size))]
                return dict(keys)
            case _:
                raise ValueError(f"a value of the unknown kind {kind}")

    def _values(self, size: int, kind: int, depth: int) -> list[Any]:
        if depth > MOST_DEEP:
            raise ValueError("lists too deep inside each other")
        if kind <= FALSE:
            return [self._byte() == TRUE for _ in range(self._possible(size))]
        return [self._value(kind, depth) for _ in range(self._possible(size))]

    def _pair(self, kinds: int, depth: int) -> tuple[Any, Any]:
        (key,) = self._values(1, kinds >> 4, depth)
        (value,) = self._values(1, kinds & 15, depth)
        return (bytes(key) if isinstance(key, memoryview) else key), value

    def _possible(self, size: int) -> int:
        """A number of values, each of which takes a byte at least."""
        if size > len(self._data) - self.at:
            raise ValueError(f"{size} values in {len(self._data) - self.at} bytes")
        return size

    def _byte(self) -> int:
        value = self._data[self.at]
        self.at += 1
        return value

    def _take(self, size: int) -> bytes:
        start, self.at = self.at, self.at + self._possible(size)
        return bytes(self._data[start : self.at])

    def _unsigned(self) -> int:
        value = shift = 0
        while True:
            byte = self._data[self.at]
            self.at += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7
            if shift > 63:
                raise ValueError("a number of more than 64 bits")

    def _signed(self) -> int:
        value = self._unsigned()
        return (value >> 1) ^ -(value & 1)
