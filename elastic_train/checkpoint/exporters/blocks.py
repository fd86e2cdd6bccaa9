"""Reading tensors in row-major order, block by block, while the block before is being written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from elastic_train.checkpoint.account import Name
from elastic_train.checkpoint.dtypes import ELEMENTS
from elastic_train.checkpoint.language.mapped import Mapped, Readable
from elastic_train.checkpoint.language.operations import FLOATING
from elastic_train.checkpoint.lazy_arrays import Array
from elastic_train.checkpoint.row_blocks import rows
from elastic_train.geometry.box import Box

BLOCK = 32 << 20
"""Bytes read at once; two such blocks are in memory for each file that is being written."""
TURNED = 512 << 20
"""A transposed tensor up to this size is read once instead of once per block of its rows."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowBlock:
    """Consecutive elements of a tensor, in its order."""

    name: Name
    box: Box
    data: Array

    @property
    def bytes(self) -> memoryview:
        return self.data.reshape(-1).view(np.uint8).data


def blocks(
    source: Readable, names: Sequence[Name], *, dtype: str | None = None, limit: int = BLOCK
) -> Iterator[RowBlock]:
    """All elements of the tensors, one tensor after the other; floating ones as `dtype`."""
    batches = list(_batches(source, names, limit))

    def read(batch: Sequence[tuple[Name, Box]]) -> list[Array]:
        arrays = source.read_many([(tensor, state, box) for (tensor, state), box in batch])
        stored = [source.tensors[name].dtype for name, _ in batch]
        return [_cast(array, kind, dtype) for array, kind in zip(arrays, stored, strict=True)]

    with ThreadPoolExecutor(1) as ahead:
        pending = ahead.submit(read, batches[0]) if batches else None
        for number, batch in enumerate(batches):
            assert pending is not None
            arrays = pending.result()
            pending = ahead.submit(read, batches[number + 1]) if number + 1 < len(batches) else None
            for (name, box), array in zip(batch, arrays, strict=True):
                yield RowBlock(name=name, box=box, data=array)
            del arrays


def written_dtype(stored: str, dtype: str | None) -> str:
    """The dtype of a tensor in the result: only floating ones are cast."""
    return dtype if dtype is not None and stored in FLOATING else stored


def _cast(array: Array, stored: str, dtype: str | None) -> Array:
    wanted = written_dtype(stored, dtype)
    return array if wanted == stored else array.astype(ELEMENTS[wanted].numpy)


def _batches(source: Readable, names: Sequence[Name], limit: int) -> Iterator[list[tuple[Name, Box]]]:
    batch: list[tuple[Name, Box]] = []
    size = 0
    for name in names:
        info = source.tensors[name]
        item = ELEMENTS[info.dtype].bytes
        for box in rows(info.shape, (TURNED if _is_turned(source, name) else limit) // item):
            if batch and size + box.numel * item > limit:
                yield batch
                batch, size = [], 0
            batch.append((name, box))
            size += box.numel * item
    if batch:
        yield batch


def _is_turned(source: Readable, name: Name) -> bool:
    """Whether rows of the tensor are no rows of what is stored."""
    if not isinstance(source, Mapped):
        return False
    for tile in source.resolved.tensors[name].tiles:
        axes = [a for a in (tile.source.axes if tile.source else ()) if a is not None]
        if axes != sorted(axes):
            return True
    return False
