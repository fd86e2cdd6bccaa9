"""The sum of the ranks' gradients, where FSDP2 does not already make it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

BUCKET_BYTES = 32 << 20


def agree_on_presence(present: list[bool], device: torch.device) -> list[bool]:
    """For each parameter, whether any rank has a gradient."""
    flags = torch.tensor(present, dtype=torch.float32, device=device)
    dist.all_reduce(flags)
    return (flags > 0).tolist()


def settle_absent(parameters: Mapping[str, nn.Parameter], present: list[bool]) -> None:
    """No gradient where no rank has one, zeros where only others have one."""
    for parameter, here in zip(parameters.values(), present, strict=True):
        if not here:
            parameter.grad = None
        elif parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def sum_over_ranks(parameters: Mapping[str, nn.Parameter]) -> None:
    """Sum gradients of whole (not sharded) parameters over all ranks, in flat buckets of a fixed order."""
    whole = [p.grad for p in parameters.values() if p.grad is not None and not isinstance(p, DTensor)]
    for bucket in _buckets(whole):
        if len(bucket) == 1 and bucket[0].is_contiguous():
            dist.all_reduce(bucket[0])
            continue
        flat = torch.cat([g.reshape(-1) for g in bucket])
        dist.all_reduce(flat)
        parts = flat.split([g.numel() for g in bucket])
        for gradient, part in zip(bucket, parts, strict=True):
            gradient.copy_(part.view_as(gradient))


def squares(parameters: Mapping[str, nn.Parameter], counted: Mapping[str, bool]) -> tuple[float, bool]:
    """Sum of squares of the counted local gradients, in float64, and whether all are finite."""
    local = {fqn: local_gradient(p) for fqn, p in parameters.items() if p.grad is not None}
    if not local:
        return 0.0, True
    norms = torch.stack([torch.linalg.vector_norm(g, dtype=torch.float64) for g in local.values()])
    mine = torch.tensor([counted[fqn] for fqn in local], dtype=torch.float64, device=norms.device)
    finite = bool(norms.isfinite().all())
    return (float((norms.square() * mine).sum()) if finite else 0.0), finite


def local_gradient(parameter: nn.Parameter) -> torch.Tensor:
    """This rank's part of a gradient."""
    gradient = parameter.grad
    assert gradient is not None
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _buckets(gradients: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Runs of one dtype of at most BUCKET_BYTES, or a single larger tensor."""
    bucket: list[torch.Tensor] = []
    size = 0
    for gradient in gradients:
        own = gradient.numel() * gradient.element_size()
        if bucket and (gradient.dtype != bucket[0].dtype or size + own > BUCKET_BYTES):
            yield bucket
            bucket, size = [], 0
        bucket.append(gradient)
        size += own
    if bucket:
        yield bucket
