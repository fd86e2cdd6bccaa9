"""Copies of parameters and optimizer state before an update inside a step, to undo it when the step is
broken off.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor


class Image:
    """Copies of parameters and of all that their optimizer keeps of them."""

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
        self._optimizer = optimizer
        self._values = [(p, _local(p).clone()) for p in parameters]
        self._states = [
            (p, {name: _kept(value) for name, value in optimizer.state[p].items()})
            for p in parameters
            if p in optimizer.state
        ]

    def put_back(self) -> None:
        """In place: who knows the tensors, knows their old values."""
        before = {id(p) for p, _ in self._states}
        with torch.no_grad():
            for parameter, value in self._values:
                _local(parameter).copy_(value)
                if id(parameter) not in before:
                    self._optimizer.state.pop(parameter, None)
            for parameter, kept in self._states:
                now = self._optimizer.state[parameter]
                for name in [name for name in now if name not in kept]:
                    del now[name]
                for name, value in kept.items():
                    if isinstance(value, torch.Tensor) and isinstance(now.get(name), torch.Tensor):
                        _local(now[name]).copy_(value)
                    else:
                        now[name] = value


def _kept(value: Any) -> Any:
    return _local(value).clone() if isinstance(value, torch.Tensor) else value


def _local(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
