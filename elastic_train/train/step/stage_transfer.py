"""Send and receive activations and gradients between pipeline stages.

The schedules of torch.distributed.pipelining are not used: they cut one batch into equal chunks themselves,
and run them under one random state, while a step here is micro-batches with ids of their own, in shares of
any length, that are counted, filled up and interrupted one by one.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
import torch.distributed as dist

from elastic_train.errors import ConfigError
from elastic_train.train.boundary.crossing import Crossing, KeptCrossings, Kind
from elastic_train.train.boundary.sender import Sender
from elastic_train.train.collectives.mesh_position import MeshPosition

FORWARD, BACKWARD, HEADER = 1, 2, 3
"""Tags of what is sent; messages of one tag between two stages keep their order."""

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool)
_DIMS = 8


def gradient_of(received: torch.Tensor) -> torch.Tensor:
    """Zeros where the stage made no use of it."""
    gradient = received.grad if received.grad is not None else torch.zeros_like(received)
    return gradient.contiguous()


class StageBoundary:
    """The two ends of a stage. Nothing is sent or received where the model begins and ends."""

    def __init__(self, place: MeshPosition, device: torch.device, sender: Sender | None = None) -> None:
        self._place, self._device, self._sender = place, device, sender
        self._sent: deque[tuple[Any, torch.Tensor]] = deque()

    def receive(self) -> torch.Tensor:
        """The output of the stage before, for the next micro-batch."""
        header = torch.empty(_DIMS + 3, dtype=torch.int64)
        self._receive(header, self._place.stage - 1, HEADER)
        dtype, needs_gradient, ndim, *sizes = header.tolist()
        tensor = torch.empty(sizes[:ndim], dtype=_DTYPES[dtype], device=self._device)
        self._receive(tensor, self._place.stage - 1, FORWARD)
        return tensor.requires_grad_(bool(needs_gradient))

    def send(self, output: Any) -> None:
        """The output to the next stage."""
        if not isinstance(output, torch.Tensor) or output.dtype not in _DTYPES or output.ndim > _DIMS:
            raise ConfigError(
                field="parallelism.pp",
                problem=f"stage {self._place.stage} hands on a {type(output).__name__}, not one tensor.",
                remedy="Let each part of the model take one tensor and return one, or use Parallelism(pp=1).",
            )
        sizes = [*output.shape, *[0] * (_DIMS - output.ndim)]
        header = torch.tensor([_DTYPES.index(output.dtype), output.requires_grad, output.ndim, *sizes])
        self._send(header, self._place.stage + 1, HEADER)
        handed = output.detach().contiguous()
        self._send(handed, self._place.stage + 1, FORWARD)
        if self._sender is not None:
            self._sender.activation(handed)

    def receive_gradient(self, output: torch.Tensor) -> torch.Tensor:
        """The gradient of what was sent for the micro-batch that is next in backward."""
        gradient = torch.empty_like(output, memory_format=torch.contiguous_format)
        self._receive(gradient, self._place.stage + 1, BACKWARD)
        return gradient

    def send_gradient(self, received: torch.Tensor) -> None:
        """The gradient of what was received; zeros where the stage made no use of it."""
        gradient = gradient_of(received)
        self._send(gradient, self._place.stage - 1, BACKWARD)
        if self._sender is not None:
            self._sender.gradient(gradient)

    def flush(self) -> None:
        """Until the neighbours have everything."""
        self._wait_down_to(0)

    def _send(self, tensor: torch.Tensor, to: int, tag: int) -> None:
        work = dist.isend(tensor, group=self._way(tag), group_dst=to, tag=tag)
        self._sent.append((work, tensor))
        # More than this can not be under way: a stage runs that many micro-batches ahead of the next at most.
        self._wait_down_to(4 * self._place.mesh.pp)

    def _receive(self, tensor: torch.Tensor, source: int, tag: int) -> None:
        dist.recv(tensor, group=self._way(tag), group_src=source, tag=tag)

    def _way(self, tag: int) -> dist.ProcessGroup | None:
        return self._place.back if tag == BACKWARD else self._place.pipe

    def _wait_down_to(self, count: int) -> None:
        while len(self._sent) > count:
            work, _ = self._sent.popleft()
            work.wait()


class ReplayedBoundary(StageBoundary):
    """The ends of a stage that runs alone: it receives what the log kept, what it sends is only logged."""

    def __init__(
        self, place: MeshPosition, device: torch.device, kept: KeptCrossings, sender: Sender
    ) -> None:
        super().__init__(place, device)
        self._kept, self._replayed, self._edges = kept, sender, sender.edges
        self._forwards, self._backwards = iter(sender.work), iter(sender.work)

    def receive(self) -> torch.Tensor:
        micro_batch, _ = next(self._forwards)
        received = self._read("activation", self._edges.first - 1, self._edges.first, micro_batch)
        return received.requires_grad_(received.is_floating_point())

    def send(self, output: Any) -> None:
        self._replayed.activation(output.detach().contiguous())

    def receive_gradient(self, output: torch.Tensor) -> torch.Tensor:
        """A filler's is zero, as it was where its backward began."""
        micro_batch, filler = next(self._backwards)
        if filler:
            return torch.zeros_like(output, memory_format=torch.contiguous_format)
        return self._read("gradient", self._edges.last + 1, self._edges.last, micro_batch)

    def send_gradient(self, received: torch.Tensor) -> None:
        self._replayed.gradient(gradient_of(received))

    def _read(self, kind: Kind, source: int, target: int, micro_batch: int) -> torch.Tensor:
        crossing = Crossing(
            step=self._replayed.step, kind=kind, source=source, target=target, micro_batch=micro_batch
        )
        return self._kept.read(crossing).to(self._device)
