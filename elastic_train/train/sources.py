"""Live tensors as the engine's sources: versions of torch, bytes of their memory, a stream of their own.

On a device the slot is registered as pinned memory, so that a copy goes from the device straight into it, on
a side stream, while the kernels of forward and backward run.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import xxhash

from elastic_train.checkpoint.piece import span
from elastic_train.geometry.digest import of_boxes
from elastic_train.geometry.fragments import Fragments
from elastic_train.train.digest import tensor_digest
from elastic_train.train.fragments import Part, numpy_bits


class TensorSource:
    """A part of a rank's shards. Buffers are not settled: a forward may write to them."""

    def __init__(self, part: Part, stream: torch.cuda.Stream | None = None) -> None:
        self.part = part
        self.key = f"{part.tensor}:{part.state}{span(part.box)}"
        self.nbytes = part.view.numel() * part.view.element_size()
        self.settled = part.state != "buffer"
        self._stream = stream

    def version(self) -> int:
        return self.part.view._version

    def fingerprint(self) -> int:
        view = self.part.view
        if view.is_cpu:
            return xxhash.xxh3_64_intdigest(self._bytes().data)
        part = self.part
        return tensor_digest(view, tensor=part.tensor, state=part.state, box=part.box, shape=part.shape)

    def fingerprint_of(self, copied: memoryview) -> int:
        if self.part.view.is_cpu:
            return xxhash.xxh3_64_intdigest(copied)
        part = self.part
        row = Fragments.of([(part.tensor, part.state, part.dtype, part.shape, part.box)])
        return of_boxes(row, [np.frombuffer(copied, np.uint8)])

    def copy(self, start: int, stop: int, target: memoryview) -> None:
        if self.part.view.is_cpu:
            np.frombuffer(target, np.uint8)[:] = self._bytes()[start:stop]
            return
        assert self._stream is not None
        with torch.cuda.stream(self._stream):
            flat = self.part.view.detach().contiguous().view(torch.uint8).reshape(-1)
            flat.record_stream(self._stream)
            torch.frombuffer(target, dtype=torch.uint8).copy_(flat[start:stop], non_blocking=True)
            done = torch.cuda.Event()
            done.record(self._stream)
        done.synchronize()

    def _bytes(self) -> np.ndarray:
        """The bytes, row-major; no copy where the tensor is contiguous."""
        return numpy_bits(self.part.view.contiguous()).reshape(-1).view(np.uint8)


def sources(held: Iterable[Part], stream: torch.cuda.Stream | None) -> list[TensorSource]:
    """One source a part. On a device the side stream first waits for the update that was just enqueued."""
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream(stream.device))
    return [TensorSource(part, stream) for part in held]


def pin(memory: memoryview) -> bool:
    """Register a region with the driver, so that copies into it need no bounce; False where it refuses."""
    address = np.frombuffer(memory, np.uint8).ctypes.data
    runtime: Any = torch.cuda.cudart()
    return int(runtime.cudaHostRegister(address, len(memory), 0)) == 0
