"""The table of contents of a zip file, by range reads: where each entry's bytes are.

Only what `torch.save` writes is read: entries that are stored as they are, zip64 where it needs it.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from elastic_train.errors import (
    CheckpointError,
    ChecksumMismatch,
    FormatUnsupported,
    FragmentMissing,
    StorageNotFound,
)
from elastic_train.storage.store import Store

_END = struct.Struct("<4s4H2LH")
_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_TAIL = _END64.size + _LOCATOR.size + _END.size
_COMMENT = 1 << 16
_MAX32 = 0xFFFFFFFF
_LATER, _UTF8 = 1 << 3, 1 << 11
"""Flags of an entry: its sizes follow its contents; its name isn't ASCII."""
_TABLE = 256 << 20
"""Bytes of the longest table of contents that is read."""
LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""How files begin that torch wrote before it wrote zips."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ZipEntry:
    """One stored file. From `header` to `end` are its header and its `size` bytes."""

    name: str  # in full
    header: int
    end: int
    size: int
    crc: int  # 0 where none was computed
    flags: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ZipIndex:
    """The entries by name, without the one directory that all of them are in, which is `root`."""

    store: Store
    path: str
    root: str
    entries: Mapping[str, ZipEntry]

    @property
    def url(self) -> str:
        return f"{self.store.url}/{self.path}"

    def read(self, names: Iterable[str]) -> dict[str, bytes]:
        """The contents of small entries, those that exist."""
        found = [self.entries[n] for n in names if n in self.entries]
        blocks = self.store.read_ranges(self.path, [(e.header, e.end - e.header) for e in found])
        contents: dict[str, bytes] = {}
        for entry, block in zip(found, blocks, strict=True):
            start = self._after_header(entry, block)
            data = contents[self._short(entry)] = block[start : start + entry.size]
            if entry.crc and zlib.crc32(data) != entry.crc:
                problem = f"{entry.name} in it isn't the one written. Copy the file again."
                raise ChecksumMismatch(url=self.url, problem=problem)
        return contents

    def starts(self, names: Iterable[str]) -> dict[str, int]:
        """The first byte of each entry's contents, as its own header says, which has to be this entry's."""
        found = [self.entries[name] for name in names]
        ranges = [(e.header, _LOCAL.size + len(e.name.encode())) for e in found]
        blocks = self.store.read_ranges(self.path, ranges) if ranges else []
        return {
            self._short(entry): entry.header + self._after_header(entry, block)
            for entry, block in zip(found, blocks, strict=True)
        }

    def _after_header(self, entry: ZipEntry, block: bytes) -> int:
        signature, _, flags, method, _, _, crc, packed, size, length, extra = _LOCAL.unpack_from(block)
        start = _LOCAL.size + length + extra
        name = block[_LOCAL.size : _LOCAL.size + length]
        if signature != b"PK\3\4" or entry.header + start + entry.size > entry.end:
            raise damaged(self.url, f"the header of {entry.name} isn't where it should be")
        same = name == entry.name.encode() and method == 0 and flags & ~_UTF8 == entry.flags & ~_UTF8
        if same and not flags & _LATER:  # else its sizes follow the contents
            same = crc == entry.crc and {packed, size} <= {entry.size, _MAX32}
        if not same:
            raise damaged(self.url, f"the header of {entry.name} and the table of contents differ")
        return start

    def _short(self, entry: ZipEntry) -> str:
        return entry.name.removeprefix(self.root + "/")


def read_index(store: Store, path: str) -> ZipIndex:
    """The index of a zip file: FragmentMissing, ChecksumMismatch or FormatUnsupported where there is none."""
    url = f"{store.url}/{path}"
    try:
        size = store.size(path)
    except StorageNotFound as error:
        raise FragmentMissing(
            url=url, problem="the file is gone. Copy it again from where it was."
        ) from error
    count, start, length = _end(store, path, size, url)
    if length > _TABLE:
        raise FormatUnsupported(
            url=url, problem=f"its table of contents has {length} bytes, too many to read."
        )
    table = store.read(path, start, length)
    entries: list[ZipEntry] = []
    at = 0
    try:
        for _ in range(count):
            entry, at = _entry(table, at, url)
            entries.append(entry)
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise damaged(url, f"its table of contents can't be read ({error})") from error
    entries.sort(key=lambda e: e.header)
    ends = [*(e.header for e in entries[1:]), start]
    roots = {e.name.partition("/")[0] for e in entries}
    if len(roots) > 1 and any(e.name.endswith("/data.pkl") for e in entries):
        raise damaged(url, f"its entries are in several directories ({', '.join(sorted(roots))[:80]!r})")
    if len(roots) != 1:
        raise FormatUnsupported(url=url, problem="this zip file isn't one that torch.save writes.")
    (root,) = roots
    placed: dict[str, ZipEntry] = {}
    for entry, end in zip(entries, ends, strict=True):
        if entry.header + _LOCAL.size + entry.size > end:
            raise damaged(url, f"{entry.name} reaches over its end")
        short = entry.name.removeprefix(root + "/")
        if short in placed:
            raise damaged(url, f"it has {entry.name} twice")
        placed[short] = replace(entry, end=end)
    return ZipIndex(store=store, path=path, root=root, entries=placed)


def damaged(url: str, what: str) -> ChecksumMismatch:
    return ChecksumMismatch(url=url, problem=f"{what}: the file is truncated or damaged. Copy it again.")


def _end(store: Store, path: str, size: int, url: str) -> tuple[int, int, int]:
    """The number of entries and the place of the table of contents, from the file's last record."""
    for length in (_TAIL, _TAIL + _COMMENT):
        tail = store.read(path, max(0, size - length), min(size, length))
        at = tail.rfind(b"PK\5\6")
        if 0 <= at <= len(tail) - _END.size and at + _END.size + _END.unpack_from(tail, at)[-1] == len(tail):
            break
    else:
        raise _no_zip(store.read(path, 0, min(size, len(LEGACY))), url)
    *_, count, length, start, _ = _END.unpack_from(tail, at)
    if at >= _LOCATOR.size and tail[at - _LOCATOR.size :].startswith(b"PK\6\7"):
        _, _, place, _ = _LOCATOR.unpack_from(tail, at - _LOCATOR.size)
        if place + _END64.size > size:
            raise damaged(url, "its end names a place behind it")
        *_, count, length, start = _END64.unpack(store.read(path, place, _END64.size))
    if start + length > size or count * _CENTRAL.size > length:
        raise damaged(url, "its table of contents isn't where its end says")
    return count, start, length


def _no_zip(head: bytes, url: str) -> CheckpointError:
    if head.startswith(LEGACY):
        return FormatUnsupported(
            url=url,
            problem="it is in the format of torch before 1.6, whose tensors can't be read in place. Load it "
            "with torch "
            "and save it again.",
        )
    if not head or head.startswith(b"PK"):
        return damaged(url, "it is empty" if not head else "its end is missing")
    return FormatUnsupported(url=url, problem="it is no file that torch.save writes.")


def _entry(table: bytes, at: int, url: str) -> tuple[ZipEntry, int]:
    """The entry at a place of the table of contents, and the place behind it."""
    signature, _, _, flags, method, _, _, crc, packed, size, n, extra, comment, _, _, _, header = (
        _CENTRAL.unpack_from(table, at)
    )
    if signature != b"PK\1\2":
        raise struct.error("no entry is where one should be")
    at += _CENTRAL.size
    name = table[at : at + n].decode()
    more = _extra64(table[at + n : at + n + extra])
    if size == _MAX32:
        size = more.pop(0)
    if packed == _MAX32:
        packed = more.pop(0)
    if header == _MAX32:
        header = more.pop(0)
    if method != 0 or flags & 1 or packed != size:
        raise FormatUnsupported(
            url=url,
            problem=f"{name} is compressed or encrypted, so its tensors can't be read in place. Unpack it, "
            "or save it "
            "again with torch.save.",
        )
    entry = ZipEntry(name=name, header=header, end=0, size=size, crc=crc, flags=flags)
    return entry, at + n + extra + comment


def _extra64(extra: bytes) -> list[int]:
    """The 64-bit numbers of an entry whose 32-bit ones are too small."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            return list(struct.unpack_from(f"<{length // 8}Q", extra, at + 4))
        at += 4 + length
    return []
