"""A queue of a device beside the one that trains, and its stand-in where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch


class SideStream(Protocol):
    """Safe from several threads. Who calls has a current stream: the one that its operations go to."""

    def follow(self) -> None:
        """What is enqueued here from now on runs after what the caller enqueued so far."""
        ...

    def entered(self) -> AbstractContextManager[None]:
        """Inside, the calling thread's operations are enqueued here."""
        ...

    def order(self) -> None:
        """What the caller enqueues from now on runs after what was enqueued here so far."""
        ...

    def wait(self) -> None:
        """Return when what was enqueued here so far is done."""
        ...

    def uses(self, tensor: torch.Tensor) -> None:
        """Its memory is read here: if it is freed meanwhile, it is not given away before that."""
        ...


class OnDevice:
    """A stream of an accelerator; order is kept by events on the device, and no thread waits for it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device)

    def follow(self) -> None:
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))

    @contextmanager
    def entered(self) -> Iterator[None]:
        with self._stream:
            yield

    def order(self) -> None:
        torch.accelerator.current_stream(self._device).wait_stream(self._stream)

    def wait(self) -> None:
        self._stream.record_event().synchronize()

    def uses(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(self._stream)


class Inline:
    """No device: what is enqueued is done at once."""

    def follow(self) -> None:
        return None

    @contextmanager
    def entered(self) -> Iterator[None]:
        yield

    def order(self) -> None:
        return None

    def wait(self) -> None:
        return None

    def uses(self, tensor: torch.Tensor) -> None:
        return None


def side_stream(device: torch.device) -> SideStream:
    return Inline() if device.type == "cpu" else OnDevice(device)
