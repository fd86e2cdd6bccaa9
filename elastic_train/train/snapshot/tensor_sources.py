"""Live tensors as sources of the snapshot engine: torch's version counters, and bytes of memory.

What a copy needs beside the slot is bounded, whatever the tensor's strides.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
import xxhash

from elastic_train.checkpoint.piece import span
from elastic_train.geometry.digest import of_boxes
from elastic_train.geometry.fragments import Fragments
from elastic_train.train.state.live_fragments import TensorPart
from elastic_train.train.state.tensor_digest import tensor_digest


class TensorSource:
    """A part of a rank's shards. Buffers are not settled: a forward may write to them."""

    def __init__(self, part: TensorPart) -> None:
        self.part = part
        self.key = f"{part.tensor}:{part.state}{span(part.box)}"
        self.nbytes = part.view.numel() * part.view.element_size()
        self.settled = part.state != "buffer"

    def version(self) -> int:
        return self.part.view._version

    def fingerprint(self) -> int:
        view = self.part.view
        if view.is_cpu:
            return xxhash.xxh3_64_intdigest(self.bytes_between(0, self.nbytes).numpy().data)
        part = self.part
        return tensor_digest(view, tensor=part.tensor, state=part.state, box=part.box, shape=part.shape)

    def fingerprint_of(self, copied: memoryview) -> int:
        if self.part.view.is_cpu:
            return xxhash.xxh3_64_intdigest(copied)
        part = self.part
        row = Fragments.of([(part.tensor, part.state, part.dtype, part.shape, part.box)])
        return of_boxes(row, [np.frombuffer(copied, np.uint8)])

    def copy(self, start: int, stop: int, target: memoryview) -> None:
        """To host memory; the calling thread waits for it."""
        found = self.bytes_between(start, stop)
        if found.is_cpu:
            np.frombuffer(target, np.uint8)[:] = found.numpy()
        else:
            torch.frombuffer(target, dtype=torch.uint8).copy_(found)

    def bytes_between(self, start: int, stop: int) -> torch.Tensor:
        """Bytes start .. stop - 1, row-major, where the tensor is: a view of a contiguous one, else a copy of
        the rows that they are in.
        """
        view = self.part.view.detach()
        if view.is_contiguous():
            return view.reshape(-1).view(torch.uint8)[start:stop]
        while view.shape[0] == 1:
            view = view[0]
        row = self.nbytes // view.shape[0]
        first = start // row
        flat = view[first : -(-stop // row)].contiguous().reshape(-1).view(torch.uint8)
        return flat[start - first * row : stop - first * row]


def sources(held: Iterable[TensorPart]) -> list[TensorSource]:
    """One source a part."""
    return [TensorSource(part) for part in held]
