"""Optimizers whose kernels take many tensors at once, where parameters of one group are cut differently.

torch updates all parameters of a group with one kernel (`foreach`, which it chooses by itself on GPUs, or
`fused`), and such a kernel takes tensors of one device mesh alone. Under tensor parallelism a group may hold
some that are cut over it and some that are whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor

BATCHED = ("foreach", "fused")
"""What optimizers of torch call these kernels in the settings of a group."""


@contextmanager
def where_cut_alike(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Inside, groups of parameters that aren't all cut over one mesh are updated one parameter at a time:
    equal up to rounding, and slower by the launches of kernels.
    """
    changed: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for group in optimizer.param_groups:
        chosen = {name: group[name] for name in BATCHED if name in group}
        if chosen and len({_mesh(p) for p in group["params"] if p.grad is not None}) > 1:
            changed.append((group, chosen))
            group.update(dict.fromkeys(chosen, False))
    try:
        yield
    finally:
        for group, chosen in changed:
            group.update(chosen)


def _mesh(parameter: torch.Tensor) -> Any:
    return parameter.device_mesh if isinstance(parameter, DTensor) else None
