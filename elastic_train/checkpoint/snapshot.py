"""A snapshot: one rank's part of the state at a step, from the worker to the commit.

Its bytes are in one buffer: a slot of an arena, which other processes of the node attach, or memory of its
own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from elastic_train.checkpoint.engine.arena import Arena, offsets
from elastic_train.checkpoint.piece import Piece
from elastic_train.geometry.fragments import Fragments


def _nothing() -> None:
    """The release of memory that nobody waits for."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Buffer:
    """`nbytes` bytes, in which fragment i begins at `offsets[i]`. `memory` is None where another process has
    it.

    Bytes in a slot of `arena` stay as they are until `release`, which may be called from any thread, and more
    than once. `stamp` proves it to other processes.
    """

    offsets: tuple[int, ...] = ()
    nbytes: int = 0
    memory: memoryview | None = None
    arena: Arena | None = None
    slot: int = -1
    stamp: int = 0
    release: Callable[[], None] = _nothing

    @classmethod
    def of(cls, arrays: Sequence[np.ndarray]) -> Buffer:
        """Memory of its own, with a copy of these arrays."""
        starts, end = offsets(array.nbytes for array in arrays)
        data = np.empty(end, np.uint8)
        for start, array in zip(starts, arrays, strict=True):
            data[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return cls(offsets=tuple(starts), nbytes=end, memory=data.data)

    @property
    def data(self) -> np.ndarray:
        """All bytes, uint8."""
        assert self.memory is not None, "another process has the bytes"
        return np.frombuffer(self.memory, np.uint8)

    @property
    def sound(self) -> bool:
        """Whether the bytes are still those of the snapshot."""
        return self.arena is None or self.arena.stamp(self.slot) == self.stamp


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Snapshot:
    """The boxes that a rank copied of a state as columns, a buffer with their bytes, and the scalars.

    `storage`: a checkpoint was asked for, so it belongs in storage too. `replica` (i of n) says which part of
    what its replicas hold too these boxes are. `seconds` were spent on copying.
    """

    generation: int
    rank: int
    step: int
    fragments: Fragments
    document: Mapping[str, Any]
    buffer: Buffer = Buffer()
    storage: bool = True
    replica: tuple[int, int] = (0, 1)
    seconds: float = 0.0

    def bytes_of(self, row: int) -> memoryview:
        """The elements of a box in row-major order."""
        memory, start = self.buffer.memory, self.buffer.offsets[row]
        assert memory is not None, "another process has the bytes"
        return memory[start : start + int(self.fragments.nbytes[row])]

    def pieces(self) -> Iterator[Piece]:
        """Its rows, one by one, as a writer takes them."""
        fragments = self.fragments
        for row, key in enumerate(fragments.key.tolist()):
            tensor, state = fragments.names[key]
            yield Piece(
                tensor=tensor,
                state=state,
                dtype=fragments.dtypes[key],
                shape=fragments.shapes[key],
                box=fragments.box(row),
                data=self.bytes_of(row),
            )

    def detached(self) -> Snapshot:
        """Without the bytes, for another process, which attaches the arena or fetches a copy."""
        there = self.buffer
        return replace(
            self,
            buffer=Buffer(offsets=there.offsets, nbytes=there.nbytes, slot=there.slot, stamp=there.stamp),
        )

    def attached(self, arena: Arena) -> Snapshot:
        """With the bytes in its slot of the same arena in this process."""
        buffer = replace(self.buffer, memory=arena.slot(self.buffer.slot)[: self.buffer.nbytes], arena=arena)
        return replace(self, buffer=buffer)

    def copied(self, data: np.ndarray) -> Snapshot:
        """With a copy of all of its bytes, uint8, as memory of its own."""
        buffer = Buffer(offsets=self.buffer.offsets, nbytes=self.buffer.nbytes, memory=data.data)
        return replace(self, buffer=buffer)
