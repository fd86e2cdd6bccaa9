"""Rows of a manifest for tensors in other systems' files: whole tensors, and ranges of flat buffers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from elastic_train.checkpoint.dtypes import element
from elastic_train.checkpoint.importers.pickle_free import TensorRef
from elastic_train.checkpoint.importers.torch_file import (
    TorchFile,
    byte_strides,
    check_readable,
    is_contiguous,
)
from elastic_train.checkpoint.importers.zip_index import damaged
from elastic_train.checkpoint.manifest import Row
from elastic_train.geometry.box import Box
from elastic_train.geometry.layout import flat_range_boxes


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """A block of a rank's slice of a tensor, and where in the tensor it lies."""

    local: Box
    offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSlice:
    """What one rank holds of a tensor: an array of `local` shape, patch by patch a part of `shape`.

    What no patch covers is padding.
    """

    local: tuple[int, ...]
    shape: tuple[int, ...]
    patches: tuple[Patch, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> FileSlice:
        patch = Patch(local=Box.whole(shape), offsets=(0,) * len(shape))
        return cls(local=shape, shape=shape, patches=(patch,))

    @property
    def is_whole(self) -> bool:
        return len(self.patches) == 1 and self.patches[0].local.sizes == self.shape

    @property
    def numel(self) -> int:
        """Elements of the local array, padding included."""
        return math.prod(self.local)


def whole_row(
    file: TorchFile,
    name: str,
    tensor: str,
    state: str,
    ref: TensorRef,
    *,
    shape: tuple[int, ...] | None = None,
) -> Row:
    """A tensor that is stored whole in `file`, called `name` in the manifest; `shape` if it is flat there."""
    check_readable(ref, f"{tensor} ({state})", url=file.url)
    if shape is not None and shape != ref.shape:
        if math.prod(shape) != math.prod(ref.shape) or not is_contiguous(ref):
            raise damaged(file.url, f"{tensor} ({state}) has shape {ref.shape} and should have {shape}")
        strides = None
    else:
        shape, strides = ref.shape, byte_strides(ref)
    return Row(
        tensor=tensor,
        state=state,
        dtype=ref.dtype,
        shape=shape,
        box=Box.whole(shape),
        file=name,
        byte_offset=file.place(ref),
        byte_strides=strides,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatPart:
    """A flat buffer in a file: its elements are `item` bytes each from byte `start` on."""

    dtype: str
    item: int
    start: int
    numel: int


def flat_parts(file: TorchFile, buffers: Mapping[str, TensorRef]) -> dict[str, FlatPart]:
    """Where the buffers of some states lie, which have one dimension and no gaps."""
    found: dict[str, FlatPart] = {}
    for state, buffer in buffers.items():
        check_readable(buffer, f"the flat {state}", url=file.url)
        if len(buffer.shape) != 1 or not is_contiguous(buffer):
            raise damaged(file.url, f"the flat {state} has shape {buffer.shape} and strides {buffer.strides}")
        item = element(buffer.dtype, url=file.url).bytes
        start, numel = file.place(buffer), buffer.shape[0]
        found[state] = FlatPart(dtype=buffer.dtype, item=item, start=start, numel=numel)
    return found


def flat_rows(
    file: TorchFile,
    name: str,
    tensor: str,
    parts: Mapping[str, FlatPart],
    *,
    at: int,
    first: int,
    count: int,
    of: FileSlice,
) -> Iterator[Row]:
    """Elements `at .. at + count` of flat buffers, one for each state, which are elements `first ..` of a
    rank's slice.
    """
    if first < 0 or first + count > of.numel:
        raise damaged(file.url, f"{tensor} has more elements than its shape")
    pieces = tuple(_pieces(of, first, count))
    for state, part in parts.items():
        if at < 0 or at + count > part.numel:
            raise damaged(file.url, f"{tensor} ({state}) isn't all in the buffer that should hold it")
        item, byte = part.item, part.start + at * part.item
        for box, offset, strides in pieces:
            yield Row(
                tensor=tensor,
                state=state,
                dtype=part.dtype,
                shape=of.shape,
                box=box,
                file=name,
                byte_offset=byte + offset * item,
                byte_strides=None if strides is None else tuple(s * item for s in strides),
            )


def _pieces(of: FileSlice, first: int, count: int) -> Iterator[tuple[Box, int, tuple[int, ...] | None]]:
    """Boxes of the whole tensor, each with its place in the range and its strides, in elements."""
    place = 0
    for block in flat_range_boxes(of.local, first, first + count):
        if of.is_whole:
            yield block, place, None
        else:
            for patch in of.patches:
                both = block.intersect(patch.local)
                if both is not None:
                    box = _moved(both.within(patch.local), patch.offsets)
                    offset = place + _offset(both.within(block).offsets, block.sizes)
                    yield box, offset, _strides(both.sizes, block.sizes)
        place += block.numel


def _moved(box: Box, by: Sequence[int]) -> Box:
    return Box(tuple(a + b for a, b in zip(box.offsets, by, strict=True)), box.sizes)


def _offset(at: Sequence[int], sizes: Sequence[int]) -> int:
    """The row-major number of an element."""
    number = 0
    for position, size in zip(at, sizes, strict=True):
        number = number * size + position
    return number


def _strides(sizes: Sequence[int], outer: Sequence[int]) -> tuple[int, ...] | None:
    """Strides of a block inside a larger one, None where its elements follow one another."""
    strides = [math.prod(outer[d + 1 :]) for d in range(len(outer))]
    dense = [math.prod(sizes[d + 1 :]) for d in range(len(sizes))]
    same = all(n == 1 or a == b for n, a, b in zip(sizes, strides, dense, strict=True))
    return None if same else tuple(strides)
