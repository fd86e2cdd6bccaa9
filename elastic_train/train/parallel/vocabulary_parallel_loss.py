"""A loss of outputs that are cut over tp: cross entropy of parts of the vocabulary, never gathered.

What is no loss gets outputs whole, of all positions that cp divides too.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from elastic_train.train.model.leaves import mapped
from elastic_train.train.model.positions import POSITIONS
from elastic_train.train.parallel.sequence_parallel import join_positions
from elastic_train.train.parallel.tensor_parallel import Regions


def of_parts(regions: Regions | None) -> AbstractContextManager[Any]:
    """Within it, cross entropy of a cut output and its backward are computed in parts."""
    return loss_parallel() if regions is not None and regions.loss else nullcontext()


def whole(value: Any) -> Any:
    """What is cut in `value`, gathered; the same on every rank."""
    return mapped(value, lambda leaf: leaf.full_tensor() if isinstance(leaf, DTensor) else leaf)


def whole_output(output: Any, context: dist.ProcessGroup | None) -> Any:
    """What the model gave, as one process has it; where cp divides positions, without a gradient."""
    gathered = whole(output)
    if context is None:
        return gathered

    def joined(leaf: Any) -> Any:
        divided = isinstance(leaf, Tensor) and leaf.ndim > POSITIONS
        return join_positions(leaf.detach(), context) if divided else leaf

    return mapped(gathered, joined)
