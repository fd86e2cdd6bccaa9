"""Copies from a device into pinned slots, on a side stream while the kernels of forward and backward run.

Nothing waits on the host: events order the copies after the update that made the state and before the one
that writes over it. Small tensors are gathered on the device and cross the bus as one.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from elastic_train.checkpoint.engine.arena import ALIGN, Arena
from elastic_train.checkpoint.engine.copying import BLOCK
from elastic_train.checkpoint.engine.lane import Span
from elastic_train.geometry.digest import MASK
from elastic_train.train.snapshot.side_stream import SideStream, side_stream
from elastic_train.train.snapshot.tensor_sources import TensorSource
from elastic_train.train.state.tensor_digest import bits_of, device_digest


class DeviceLane:
    """On the device it takes one block of memory, there before the first step. Its sources are TensorSources.

    `pinned`: whether the driver took the arena's pages, so that the device writes to them itself.
    """

    def __init__(self, device: torch.device, arena: Arena, side: SideStream | None = None) -> None:
        self.instant = device.type == "cpu"
        self._device, self._side = device, side or side_stream(device)
        self._block = torch.empty(BLOCK + ALIGN, dtype=torch.uint8, device=device)
        self._one = threading.Lock()  # of the threads that enqueue: the block is filled and sent by one
        if not isinstance(arena.pins, Pins):
            arena.pins = Pins(device, arena)
        self._pins: Pins | None = arena.pins
        self.pinned = arena.pins.whole

    def follow(self) -> None:
        self._side.follow()

    def copy(self, spans: Sequence[Span], memory: memoryview) -> None:
        first, last = spans[0], spans[-1]
        extent = last.offset + last.stop - last.start - first.offset
        target = torch.frombuffer(memory, dtype=torch.uint8)[first.offset : first.offset + extent]
        with self._one, self._side.entered():
            parts = [source.bytes_between(start, stop) for source, start, stop, _ in spans]
            for part in parts:
                self._side.uses(part)
            if len(parts) == 1:
                target.copy_(parts[0], non_blocking=True)
                return
            places = [self._block[s.offset - first.offset :][: s.stop - s.start] for s in spans]
            torch._foreach_copy_(places, parts)  # pyright: ignore[reportPrivateImportUsage]
            target.copy_(self._block[:extent], non_blocking=True)

    def order(self) -> None:
        self._side.order()

    def wait(self) -> None:
        self._side.wait()

    def fingerprint(self, source: TensorSource) -> Callable[[], int]:
        """Computed on the device behind the update; the thread that asks for the number waits for it."""
        if self._device.type == "cpu":
            found = source.fingerprint()
            return lambda: found
        part = source.part
        with self._side.entered():
            self._side.uses(part.view)
            digest = device_digest(
                bits_of(part.view), tensor=part.tensor, state=part.state, box=part.box, shape=part.shape
            )

        def read() -> int:
            with self._side.entered():
                return int(digest) & MASK

        return read

    def close(self) -> None:
        self._side.wait()
        self._pins = None


class Pins:
    """An arena's slots, registered with the driver of a device until neither a lane nor the arena needs them.

    `whole`: whether the driver took all of them.
    """

    def __init__(self, device: torch.device, arena: Arena) -> None:
        slots = [arena.slot(number) for number in range(arena.slots)]
        addresses = [address for slot in slots if (address := pin(device, slot))]
        self.whole = len(addresses) == arena.slots
        # The memory stays mapped while it is registered. A process that ends takes all of it with it.
        weakref.finalize(self, _unpin, device, addresses, slots).atexit = False


def _unpin(device: torch.device, addresses: Sequence[int], _mapped: Sequence[memoryview]) -> None:
    for address in addresses:
        _runtime(device).cudaHostUnregister(address)


def pin(device: torch.device, memory: memoryview) -> int:
    """Register a region with the driver, so that copies into it need no bounce; 0 where that isn't possible,
    else its address.
    """
    runtime = _runtime(device)
    if runtime is None:
        return 0
    address = np.frombuffer(memory, np.uint8).ctypes.data
    return address if int(runtime.cudaHostRegister(address, len(memory), 0)) == 0 else 0


def _runtime(device: torch.device) -> Any:
    """The driver's own interface; None where the device has none like that (only CUDA's and ROCm's have)."""
    found = getattr(torch.get_device_module(device), "cudart", None)
    return found() if found is not None else None
