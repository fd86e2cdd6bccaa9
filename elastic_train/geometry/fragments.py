"""Fragments as a table: columns of boxes over named tensors, a million of them without an object each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from elastic_train.geometry.box import Box

Ints = npt.NDArray[np.int64]

ITEM_BYTES = MappingProxyType(
    {
        "bool": 1,
        "uint8": 1,
        "int8": 1,
        "float8_e4m3fn": 1,
        "float8_e5m2": 1,
        "uint16": 2,
        "int16": 2,
        "float16": 2,
        "bfloat16": 2,
        "uint32": 4,
        "int32": 4,
        "float32": 4,
        "uint64": 8,
        "int64": 8,
        "float64": 8,
        "complex64": 8,
    }
)
"""Bytes of one element, by dtype name."""

Row = tuple[str, str, str, tuple[int, ...], Box]
"""Tensor, state name, dtype, shape of the whole tensor, box."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fragments:
    """n boxes over named tensors. `key` says which of `names`, `dtypes` and `shapes` a row belongs to.

    `offsets` and `sizes` are [n, D], D the most dims of any tensor here; dims that a tensor does not have are
    at offset 0 with size 1. Rows may be empty, repeat or overlap.
    """

    names: tuple[tuple[str, str], ...]  # (tensor, state), each once
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    key: npt.NDArray[np.int32]
    offsets: Ints
    sizes: Ints

    def __post_init__(self) -> None:
        assert len(self.names) == len(self.dtypes) == len(self.shapes) == len(set(self.names))
        assert self.offsets.ndim == 2
        assert self.offsets.shape == self.sizes.shape
        assert len(self.key) == len(self.offsets)

    @classmethod
    def of(cls, rows: Iterable[Row]) -> Fragments:
        """A table of rows given one by one. A name must have the same dtype and shape in all of its rows."""
        keys: dict[tuple[str, str], int] = {}
        kinds: list[tuple[str, tuple[int, ...]]] = []
        key: list[int] = []
        boxes: list[Box] = []
        for tensor, state, dtype, shape, box in rows:
            at = keys.setdefault((tensor, state), len(keys))
            if at == len(kinds):
                kinds.append((dtype, tuple(shape)))
            assert kinds[at] == (dtype, tuple(shape)), f"{tensor} {state} has two dtypes or shapes"
            assert len(box.sizes) == len(shape), f"{tensor} {state} of shape {shape} has no box {box}"
            key.append(at)
            boxes.append(box)
        dims = max((len(shape) for _, shape in kinds), default=0)
        offsets = [b.offsets + (0,) * (dims - len(b.offsets)) for b in boxes]
        sizes = [b.sizes + (1,) * (dims - len(b.sizes)) for b in boxes]
        return cls(
            names=tuple(keys),
            dtypes=tuple(dtype for dtype, _ in kinds),
            shapes=tuple(shape for _, shape in kinds),
            key=np.array(key, dtype=np.int32),
            offsets=np.array(offsets, dtype=np.int64).reshape(len(boxes), dims),
            sizes=np.array(sizes, dtype=np.int64).reshape(len(boxes), dims),
        )

    @classmethod
    def concat(cls, tables: Sequence[Fragments]) -> Fragments:
        """The rows of all tables, in order, under one set of names."""
        keys: dict[tuple[str, str], int] = {}
        kinds: list[tuple[str, tuple[int, ...]]] = []
        dims = max((t.offsets.shape[1] for t in tables), default=0)
        columns: list[tuple[npt.NDArray[np.int32], Ints, Ints]] = []
        renumbered: dict[object, npt.NDArray[np.int32]] = {}  # the ranks of one layout share their names
        for table in tables:
            head = (table.names, table.dtypes, table.shapes)
            if head not in renumbered:
                for name, dtype, shape in zip(*head, strict=True):
                    at = keys.setdefault(name, len(keys))
                    if at == len(kinds):
                        kinds.append((dtype, shape))
                    assert kinds[at] == (dtype, shape), f"{name} is {kinds[at]} in one table, not in another"
                renumbered[head] = np.array([keys[name] for name in table.names], dtype=np.int32)
            columns.append((renumbered[head][table.key], *table.padded(dims)))
        none = (np.zeros(0, np.int32), np.zeros((0, dims), np.int64), np.zeros((0, dims), np.int64))
        key, offsets, sizes = (np.concatenate(column) for column in zip(none, *columns, strict=True))
        return cls(
            names=tuple(keys),
            dtypes=tuple(dtype for dtype, _ in kinds),
            shapes=tuple(shape for _, shape in kinds),
            key=key,
            offsets=offsets,
            sizes=sizes,
        )

    def __len__(self) -> int:
        return len(self.key)

    def box(self, row: int) -> Box:
        dims = len(self.shapes[int(self.key[row])])
        return Box(tuple(self.offsets[row, :dims].tolist()), tuple(self.sizes[row, :dims].tolist()))

    @property
    def numel(self) -> Ints:
        """Elements of each row, [n]."""
        count = np.ones(len(self.sizes), np.int64)
        for dim in range(self.sizes.shape[1]):  # a product over so short an axis takes ten times as long
            count *= self.sizes[:, dim]
        return count

    @property
    def nbytes(self) -> Ints:
        """Bytes of each row, [n]."""
        return self.numel * np.array([ITEM_BYTES[d] for d in self.dtypes], dtype=np.int64)[self.key]

    def take(self, rows: npt.NDArray[np.integer] | npt.NDArray[np.bool_]) -> Fragments:
        """The chosen rows, by index or mask, under the same names."""
        return Fragments(
            names=self.names,
            dtypes=self.dtypes,
            shapes=self.shapes,
            key=self.key[rows],
            offsets=self.offsets[rows],
            sizes=self.sizes[rows],
        )

    def padded(self, dims: int) -> tuple[Ints, Ints]:
        """`offsets` and `sizes` with at least `dims` columns."""
        missing = ((0, 0), (0, max(0, dims - self.offsets.shape[1])))
        return np.pad(self.offsets, missing), np.pad(self.sizes, missing, constant_values=1)
