"""Whether an optimizer does the same to sharded tensors as to whole ones; tried, not believed."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from elastic_train.errors import ConfigError
from elastic_train.train.collectives.process_group import is_collective_error
from elastic_train.train.model.optimizer import Groups, twin

STEPS = 2
TOLERANCE = 1e-9


def check_sharded_update(
    optimizer: torch.optim.Optimizer,
    groups: Groups,
    ndims: dict[str, int],
    mesh: DeviceMesh,
    device: torch.device,
) -> None:
    """Update tiny float64 tensors whole and sharded along the last axis of `mesh`, and compare.

    Each group is tried with one tensor for each number of dims among its parameters, uneven over the ranks.
    All ranks of the mesh must call it: an optimizer may communicate. A difference is a ConfigError.
    """
    ranks, axis = mesh.size(mesh.ndim - 1), (mesh.mesh_dim_names or ("dp_shard",))[-1]
    remedy = f"Choose another optimizer, or keep parameters whole with Parallelism({axis}=1)."
    shapes = [
        [(2 * ranks + 1,) + (3,) * (n - 1) for n in sorted({ndims[fqn] for fqn in group} - {0})]
        for group in groups
    ]
    generator = torch.Generator().manual_seed(0)
    draws = [
        [
            [torch.randn(shape, generator=generator, dtype=torch.float64).to(device) for shape in group]
            for group in shapes
        ]
        for _ in range(STEPS + 1)
    ]
    whole = [[nn.Parameter(t.clone()) for t in group] for group in draws[0]]
    cut = [[nn.Parameter(_shard(t, mesh)) for t in group] for group in draws[0]]
    _train(optimizer, whole, draws[1:])
    name = type(optimizer).__name__
    try:
        _train(optimizer, cut, [[[_shard(t, mesh) for t in group] for group in draw] for draw in draws[1:]])
        found = [_whole(p) for group in cut for p in group]
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        if is_collective_error(error):
            raise
        raise ConfigError(
            field="task.optimizer",
            problem=f"{name} cannot update sharded parameters: {error}",
            remedy=remedy,
        ) from error
    expected = [p.detach() for group in whole for p in group]
    for a, b in zip(found, expected, strict=True):
        if not torch.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE):
            raise ConfigError(
                field="task.optimizer",
                problem=(
                    f"{name} updates sharded parameters otherwise than whole ones (difference "
                    f"{(a - b).abs().max().item():.1e} on a tensor of shape {tuple(a.shape)})."
                ),
                remedy=remedy,
            )


def _shard(tensor: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """This rank's rows, as FSDP2 cuts them; no communication."""
    axis = mesh.ndim - 1
    chunks = list(torch.chunk(tensor, mesh.size(axis)))
    at = mesh.get_local_rank(axis)
    local = chunks[at] if at < len(chunks) else tensor[:0]
    return DTensor.from_local(
        local.clone(),
        mesh,
        [*[Replicate()] * axis, Shard(0)],
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.full_tensor().detach()


def _train(
    optimizer: torch.optim.Optimizer, groups: list[list[nn.Parameter]], draws: list[list[list]]
) -> None:
    tried = twin(optimizer, groups)  # type: ignore[arg-type]
    for draw in draws:
        for parameters, gradients in zip(groups, draw, strict=True):
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient.clone()
        tried.step()
