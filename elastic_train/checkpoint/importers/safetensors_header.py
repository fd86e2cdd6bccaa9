"""The header of a safetensors file: names, shapes and byte ranges, checked against the file's size."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elastic_train.checkpoint.dtypes import ELEMENTS
from elastic_train.errors import ChecksumMismatch, FormatUnsupported, FragmentMissing, StorageNotFound
from elastic_train.storage.store import Store

MOST, DIMS = 2**63, 64
LIMIT = 100_000_000
"""Bytes of the longest header that the format allows."""
CODES = {element.code: name for name, element in ELEMENTS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """One tensor of a file, row-major from byte `start` of the file on."""

    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * ELEMENTS[self.dtype].bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    tensors: Mapping[str, StoredTensor]
    words: Mapping[str, str]  # `__metadata__`


def read_header(store: Store, path: str) -> Header:
    """The header, in two reads. ChecksumMismatch where it doesn't fit the file."""
    url = f"{store.url}/{path}"
    try:
        size = store.size(path)
    except StorageNotFound as error:
        raise FragmentMissing(
            url=url, problem="the file is gone. Copy it again from where it was."
        ) from error
    length = int.from_bytes(store.read(path, 0, 8), "little") if size >= 8 else -1
    if not 2 <= length <= min(LIMIT, size - 8):
        raise _damaged(url, f"it has {size} bytes and no header")
    try:
        value = json.loads(store.read(path, 8, length), object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise _damaged(url, f"its header isn't JSON ({error})") from error
    if not isinstance(value, dict):
        raise _damaged(url, "its header is no object")
    words = value.pop("__metadata__", None) or {}
    if not isinstance(words, dict) or not all(isinstance(w, str) for w in words.values()):
        raise _damaged(url, "its __metadata__ isn't text by words")
    tensors = {name: _stored(name, entry, 8 + length, size, url) for name, entry in value.items()}
    at = 8 + length
    for name, stored in sorted(tensors.items(), key=lambda t: (t[1].start, t[1].bytes)):
        if stored.start != at:
            raise _damaged(url, f"{name} begins at byte {stored.start} and the tensor before it ends at {at}")
        at += stored.bytes
    if at != size:
        raise _damaged(url, f"its tensors end at byte {at} of {size}")
    return Header(tensors=tensors, words=words)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name comes twice")
    return found


def _stored(name: str, entry: Any, base: int, size: int, url: str) -> StoredTensor:
    try:
        code, shape, (first, last) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        numbers = [*shape, first, last]
        if not all(type(n) is int and 0 <= n < MOST for n in numbers) or len(shape) > DIMS:
            raise ValueError(numbers)
    except (TypeError, KeyError, ValueError) as error:
        raise _damaged(url, f"its header describes {name} by {entry!r}") from error
    if code not in CODES:
        raise FormatUnsupported(url=url, problem=f"{name} has the dtype {code!r}, which can't be read.")
    wanted = math.prod(shape) * ELEMENTS[CODES[code]].bytes
    if last - first != wanted:
        raise _damaged(url, f"{name} of {code} {list(shape)} has {last - first} bytes, not {wanted}")
    if base + last > size:
        raise _damaged(url, f"{name} ends at byte {base + last} of {size}")
    return StoredTensor(dtype=CODES[code], shape=shape, start=base + first)


def _damaged(url: str, what: str) -> ChecksumMismatch:
    return ChecksumMismatch(url=url, problem=f"{what}: the file is truncated or damaged. Copy it again.")
