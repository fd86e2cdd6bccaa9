"""Compute activations of blocks again in backward instead of keeping them.

Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016; selectively: Korthikanti et al., Reducing
Activation Recomputation in Large Transformer Models, 2022. Random masks are drawn again as they were, because
torch restores the generator that they are drawn from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from elastic_train.planner.plan import Recompute

KEPT = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.linear.default,
        torch.ops.aten.convolution.default,
    }
)
"""What "selective" keeps: results of projections. The inside of attention and what works on single elements
is cheap beside the memory that it fills."""


def recompute_blocks(blocks: Sequence[nn.Module], kind: Recompute) -> None:
    """From now on the blocks keep their inputs alone, or with "selective" the results of projections too."""
    if kind == "none":
        return
    context: dict[str, Any] = {}
    if kind == "selective":
        context["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    for block in blocks:
        block.forward = _again(block.forward, context)


def _again(forward: Callable[..., Any], context: dict[str, Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # To its end: what opens a region of cut activations, closes it too.
        return checkpoint(forward, *args, use_reentrant=False, early_stop=False, **context, **kwargs)

    return run


def _policy(_context: object, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in KEPT else CheckpointPolicy.PREFER_RECOMPUTE
