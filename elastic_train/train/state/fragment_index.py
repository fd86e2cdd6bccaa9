"""Index of local fragments by box: serves reads from a local state and fills new shards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from elastic_train.errors import TensorMismatch
from elastic_train.geometry.box import Box
from elastic_train.geometry.digest import MASK
from elastic_train.geometry.fragments import Fragments
from elastic_train.train.state.live_fragments import TensorPart, memory_of_box, read_box, table, write_box
from elastic_train.train.state.tensor_digest import tensor_digest


class FragmentIndex:
    """The parts of a rank's shards by name. Reading is safe from several threads."""

    def __init__(self, held: Iterable[TensorPart]) -> None:
        self.parts = tuple(held)
        self._by_name: dict[tuple[str, str], list[TensorPart]] = {}
        for part in self.parts:
            self._by_name.setdefault((part.tensor, part.state), []).append(part)

    def table(self) -> Fragments:
        return table(self.parts)

    def parts_of(self, name: tuple[str, str]) -> list[TensorPart]:
        """What is here of a (tensor, state)."""
        return self._by_name.get(name, [])

    def read(self, wanted: Fragments) -> list[np.ndarray]:
        """The bytes of each box, uint8."""
        return [read_box(self._holder(wanted, row), wanted.box(row)) for row in range(len(wanted))]

    def write(self, boxes: Fragments, arrays: Sequence[np.ndarray]) -> None:
        """Copy bytes into the boxes."""
        assert len(boxes) == len(arrays)
        for row, data in enumerate(arrays):
            write_box(self._holder(boxes, row), boxes.box(row), data)

    def memory(self, boxes: Fragments) -> Iterator[memoryview]:
        """Memory for the bytes of each box, in order. What was yielded is full when the next is asked for."""
        for row in range(len(boxes)):
            part, box = self._holder(boxes, row), boxes.box(row)
            own = memory_of_box(part, box)
            if own is not None:
                yield own.data
                continue
            beside = np.empty(int(boxes.nbytes[row]), np.uint8)
            yield beside.data
            write_box(part, box, beside)

    def digest(self) -> int:
        """The digest of all parts, each counted."""
        return sum(_digest(part, part.box) for part in self.parts) & MASK

    def digest_of(self, boxes: Fragments) -> int:
        """The digest of boxes, each counted."""
        rows = range(len(boxes))
        return sum(_digest(self._holder(boxes, row), boxes.box(row)) for row in rows) & MASK

    def _holder(self, boxes: Fragments, row: int) -> TensorPart:
        key, box = int(boxes.key[row]), boxes.box(row)
        name = boxes.names[key]
        candidates = self._by_name.get(name, [])
        for part in candidates:
            if part.dtype != boxes.dtypes[key] or part.shape != tuple(boxes.shapes[key]):
                raise TensorMismatch(
                    url=f"{name[0]} {name[1]}",
                    problem=(
                        f"it is {part.dtype} {part.shape} here, and {boxes.dtypes[key]} "
                        f"{tuple(boxes.shapes[key])} on the other side."
                    ),
                )
            if _contains(part.box, box):
                return part
        raise TensorMismatch(url=f"{name[0]} {name[1]}", problem=f"this rank does not hold {box}.")


def _digest(part: TensorPart, box: Box) -> int:
    view = part.view[box.within(part.box).slices]
    return tensor_digest(view, tensor=part.tensor, state=part.state, box=box, shape=part.shape)


def _contains(outer: Box, inner: Box) -> bool:
    return all(
        a <= b and b + m <= a + n
        for a, n, b, m in zip(outer.offsets, outer.sizes, inner.offsets, inner.sizes, strict=True)
    )
