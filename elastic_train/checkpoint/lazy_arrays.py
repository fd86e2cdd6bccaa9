"""Indexing a checkpoint: the arrays that are read only where they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from elastic_train.checkpoint.dtypes import ELEMENTS
from elastic_train.geometry.box import Box

Array = npt.NDArray[np.generic]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """What a checkpoint holds under one (tensor, state)."""

    dtype: str
    shape: tuple[int, ...]


class States(Mapping[str, "LazyArrays"]):
    """The states of one tensor, by name."""

    def __init__(self, states: Mapping[str, TensorInfo], read: Callable[[str, Box], Array]) -> None:
        self._states, self._read = states, read

    def __getitem__(self, state: str) -> LazyArrays:
        return LazyArrays(info=self._states[state], read=lambda box: self._read(state, box))

    def __iter__(self) -> Iterator[str]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LazyArrays:
    """A stored tensor that is read when it is indexed: by integers, slices of step 1 and an ellipsis."""

    info: TensorInfo
    read: Callable[[Box], Array]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.info.shape

    @property
    def dtype(self) -> np.dtype:
        return ELEMENTS[self.info.dtype].numpy

    def __getitem__(self, index: object) -> Array:
        box, dropped = _box(index if isinstance(index, tuple) else (index,), self.shape)
        data = self.read(box)
        return data.reshape([n for d, n in enumerate(data.shape) if d not in dropped])

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> Array:
        data = self.read(Box.whole(self.shape))
        return data if dtype is None else data.astype(dtype, copy=False)


def _box(index: tuple[object, ...], shape: tuple[int, ...]) -> tuple[Box, set[int]]:
    """The box that an index means, and the dims that its integers remove."""
    if Ellipsis in index:
        at = index.index(Ellipsis)
        missing = len(shape) - len(index) + 1
        index = (*index[:at], *(slice(None),) * missing, *index[at + 1 :])
    index = (*index, *(slice(None),) * (len(shape) - len(index)))
    if len(index) != len(shape):
        raise IndexError(f"{len(index)} indices for {len(shape)} dims")
    offsets, sizes, dropped = [], [], set[int]()
    for dim, (part, size) in enumerate(zip(index, shape, strict=True)):
        match part:
            case int():
                if not -size <= part < size:
                    raise IndexError(f"index {part} is out of bounds for dim {dim} with size {size}")
                offsets.append(part % size)
                sizes.append(1)
                dropped.add(dim)
            case slice() if part.step in (None, 1):
                start, stop, _ = part.indices(size)
                offsets.append(start)
                sizes.append(max(0, stop - start))
            case _:
                raise IndexError(f"a stored tensor is indexed by integers and slices of step 1, not {part!r}")
    return Box(tuple(offsets), tuple(sizes)), dropped
