"""The files that `torch.save` writes: a zip of stored entries, the pickle first, then each tensor's bytes.

Written in one pass: sizes are known before, check sums follow the data.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from elastic_train.checkpoint.exporters.pickled import pickled

ALIGNMENT = 64
_BIG = 0xFFFFFFFF
_FLAGS = 0x0808  # check sum after the data; names in UTF-8
Write = Callable[[bytes | memoryview], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    name: bytes
    header: int
    size: int
    crc: int


class TorchZip:
    """One file, written to `write` from its beginning on. `root` is the name that torch would give it."""

    def __init__(self, write: Write, *, root: str) -> None:
        self._write, self._root = write, root
        self._entries: list[_Entry] = []
        self.length = 0

    def add(self, name: str, size: int, data: Iterable[bytes | memoryview]) -> None:
        """An entry of `size` bytes, in any number of parts."""
        full = f"{self._root}/{name}".encode()
        header = self.length
        wide = size >= _BIG or header >= _BIG
        start = header + 30 + len(full)
        padding = -(start + 4) % ALIGNMENT
        self._put(struct.pack("<4s5H3L2H", b"PK\3\4", 0, _FLAGS, 0, 0, 0, 0, 0, 0, len(full), 4 + padding))
        self._put(full + struct.pack("<2sH", b"FB", padding) + b"Z" * padding)
        crc, written = 0, 0
        for part in data:
            crc = zlib.crc32(part, crc)
            written += len(part)
            self._put(part)
        assert written == size, f"{name}: {written} bytes were given, not {size}"
        self._put(struct.pack("<4sL2Q" if wide else "<4s3L", b"PK\7\x08", crc, size, size))
        self._entries.append(_Entry(name=full, header=header, size=size, crc=crc))

    def finish(self) -> None:
        """The table of contents."""
        start = self.length
        for entry in self._entries:
            wide = [n for n in (entry.size, entry.size, entry.header) if n >= _BIG]
            extra = struct.pack(f"<2H{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
            size, header = min(entry.size, _BIG), min(entry.header, _BIG)
            lengths = (len(entry.name), len(extra))
            self._put(
                struct.pack(
                    "<4s6H3L5H2L",
                    *(b"PK\1\2", 0, 45 if wide else 0, _FLAGS, 0, 0, 0),
                    *(entry.crc, size, size, *lengths, 0, 0, 0, 0, header),
                )
                + entry.name
                + extra
            )
        length, count = self.length - start, len(self._entries)
        if start >= _BIG or count >= 0xFFFF:
            end = self.length
            self._put(struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, length, start))
            self._put(struct.pack("<4sLQL", b"PK\6\7", 0, end, 1))
        count = min(count, 0xFFFF)
        self._put(struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, count, count, length, min(start, _BIG), 0))

    def _put(self, data: bytes | memoryview) -> None:
        self._write(data)
        self.length += len(data)


def write_torch(
    write: Write,
    tree: Any,
    storages: Mapping[str, tuple[int, Iterable[bytes | memoryview]]],
    *,
    root: str = "archive",
) -> int:
    """A whole file: the pickle of `tree` and, by key, size and bytes of the storages it names; its length."""
    file = TorchZip(write, root=root)
    data = pickled(tree)
    file.add("data.pkl", len(data), [data])
    file.add("byteorder", 6, [b"little"])
    for key, (size, parts) in storages.items():
        file.add(f"data/{key}", size, parts)
    file.add("version", 2, [b"3\n"])
    file.finish()
    return file.length
