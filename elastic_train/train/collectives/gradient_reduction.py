"""Reduce gradients over ranks where FSDP2 does not do it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from elastic_train.train.collectives.mesh_position import MeshPosition

CONTEXT_SHARD = "dp_shard_cp"
"""dp_shard and cp as one axis: under cp, whose ranks hold the same parameters, FSDP2 cuts over both."""
SHARDS = frozenset({"dp_shard", "expert_shard", CONTEXT_SHARD})
"""Axes along which FSDP2 cuts tensors."""


def agree_on_presence(present: Mapping[str, bool], names: Sequence[str], device: torch.device) -> list[bool]:
    """For each of `names`, the trainable parameters of the whole model, whether any rank has a gradient."""
    flags = torch.tensor([present.get(fqn, False) for fqn in names], dtype=torch.float32, device=device)
    dist.all_reduce(flags)
    return (flags > 0).tolist()


def settle_absent(parameters: Mapping[str, nn.Parameter], present: Mapping[str, bool]) -> None:
    """No gradient where no rank has one, zeros where only others have one."""
    for fqn, parameter in parameters.items():
        if not present[fqn]:
            parameter.grad = None
        elif parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def align(parameters: Mapping[str, nn.Parameter]) -> None:
    """Cut gradients as their parameters are."""
    for parameter in parameters.values():
        if parameter.grad is not None:
            parameter.grad = aligned(parameter, parameter.grad)


def aligned(parameter: nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
    """A gradient cut as its parameter is: torch returns that of an embedding cut by rows whole."""
    if isinstance(parameter, DTensor) and isinstance(gradient, DTensor):
        return gradient.redistribute(placements=parameter.placements)
    return gradient


def sum_over_stages(
    parameters: Mapping[str, nn.Parameter],
    place: MeshPosition,
    sent: Callable[[str, int, torch.Tensor], None],
) -> None:
    """Sum the gradients of tensors that are on several stages, in the order of the stages.

    `sent` is called with (fqn, stage, gradient) for each one that went to another stage.
    """
    if place.pipe is None:
        return
    for fqn, parameter in parameters.items():
        stages = place.stages_of(fqn)
        if len(stages) == 1 or parameter.grad is None:
            continue
        own = local_gradient(parameter)
        mine = own.contiguous()
        others = {stage: torch.empty_like(mine) for stage in stages if stage != place.stage}
        works: list[dist.Work | None] = []
        for stage, received in others.items():
            # A device's communicator keeps the order in which two ranks do it: one sends first, one receives.
            for sends in (place.stage < stage, place.stage > stage):
                if sends:
                    works.append(dist.isend(mine, group=place.pipe, group_dst=stage))
                else:
                    works.append(dist.irecv(received, group=place.pipe, group_src=stage))
        for work in works:
            assert work is not None
            work.wait()
        for stage in others:
            sent(fqn, stage, mine)
        own.copy_(summed(mine, others, stages))


def summed(mine: torch.Tensor, others: Mapping[int, torch.Tensor], stages: Sequence[int]) -> torch.Tensor:
    """The sum over the stages of a tensor, in their order: the same on each of them."""
    total = torch.zeros_like(mine)
    for stage in stages:
        total += others.get(stage, mine)
    return total


def is_sharded(parameter: torch.Tensor) -> bool:
    """Whether FSDP2 cuts a parameter, and so sums its gradient."""
    return isinstance(parameter, DTensor) and not SHARDS.isdisjoint(
        parameter.device_mesh.mesh_dim_names or ()
    )


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
