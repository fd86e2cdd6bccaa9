"""An exponential average of the trained parameters: state of each, beside that of the optimizer.

So it is cut, moved and saved as the optimizer's own state is. As torch's AveragedModel, it is a copy after
the first update. Buffers are the model's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.tensor import DTensor

AVERAGE = "average"
"""The name of the state."""


@contextmanager
def averaging(optimizer: torch.optim.Optimizer, decay: float | None) -> Iterator[None]:
    """A step of the optimizer belongs inside. Without a decay there is no average."""
    own = [p for group in optimizer.param_groups for p in group["params"]]
    late: dict[nn.Parameter, torch.Tensor] = {}
    if decay is not None and any(AVERAGE in optimizer.state.get(p, {}) for p in own):
        # Their first gradient comes now: until now the average was the parameter.
        missing = [p for p in own if p.grad is not None and AVERAGE not in optimizer.state.get(p, {})]
        late = {p: p.detach().clone() for p in missing}
    yield
    if decay is None:
        return
    with torch.no_grad():
        for parameter in own:
            state = optimizer.state.get(parameter, {})
            if AVERAGE in state:
                _local(state[AVERAGE]).lerp_(_local(parameter), 1 - decay)
            elif parameter.grad is not None:
                first = late.get(parameter)
                average = parameter.detach().clone() if first is None else first
                _local(average).lerp_(_local(parameter), 1 - decay)
                optimizer.state[parameter][AVERAGE] = average


@contextmanager
def in_place(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Within it the parameters are their averages, where they have any."""
    state = optimizer.state
    kept = [(p, _local(p).clone()) for p in parameters.values() if AVERAGE in state.get(p, {})]
    with torch.no_grad():
        for parameter, _ in kept:
            _local(parameter).copy_(_local(state[parameter][AVERAGE]))
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in kept:
                _local(parameter).copy_(value)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
