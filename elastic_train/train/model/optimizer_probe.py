"""Try whether an optimizer updates sharded tensors as it updates whole ones."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from elastic_train.errors import ConfigError
from elastic_train.train.collectives.process_group import is_collective_error
from elastic_train.train.model.closures import cells_of
from elastic_train.train.model.moving_state import Moving, check_storable, prints
from elastic_train.train.model.optimizer import Groups, twin
from elastic_train.train.model.rng import preserved
from elastic_train.train.model.several_models import Optimizers
from elastic_train.train.model.surroundings import Surroundings
from elastic_train.train.model.value_prints import print_of

STEPS = 2
_OF_STEPS = (RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError)
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
    draws = _draws(groups, ndims, 2 * ranks + 1, device)
    whole = [[nn.Parameter(t.clone()) for t in group] for group in draws[0]]
    cut = [[nn.Parameter(_shard(t, mesh)) for t in group] for group in draws[0]]
    name = type(optimizer).__name__
    try:
        _train(optimizer, whole, draws[1:])
    except _OF_STEPS as error:
        raise ConfigError(
            field="task.optimizer",
            problem=f"{name} cannot be tried on sharded parameters, as it fails on whole ones: {error}",
            remedy=remedy,
        ) from error
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


def moving_of(
    optimizer: torch.optim.Optimizer, groups: Groups, ndims: dict[str, int], device: torch.device
) -> Moving:
    """What steps change beside the state of parameters, as far as a twin over tiny tensors shows it.

    ConfigError for what could not be carried from one group to the next.
    """
    moving = Moving()
    draws = _draws(groups, ndims, 3, device)
    tensors = [[nn.Parameter(t.clone()) for t in group] for group in draws[0]]
    with preserved(device):
        tried = twin(optimizer, tensors)  # type: ignore[arg-type]
        before, hooks, around = prints(tried), _hooks(tried), _surroundings(tried)
        try:
            for draw in draws[1:]:
                _step(tried, tensors, draw)
        except (*_OF_STEPS, ConfigError):
            return moving  # its real steps are looked at too
    moving.names |= {name for name, mark in prints(tried).items() if before.get(name) != mark}
    check_storable(tried, moving.names)
    for name, mark in _hooks(tried).items():
        if hooks.get(name) != mark:
            raise ConfigError(
                field="task.optimizer",
                problem=f"the hook {name} of {type(optimizer).__name__}.step() keeps state of its own, which "
                "would be lost whenever the group changes.",
                remedy="Keep it in optimizer.state[parameter], or in numbers of a parameter group.",
            )
    for place, mark in _surroundings(tried).items():
        if around.get(place) != mark:
            raise ConfigError(
                field="task.optimizer",
                problem=f"{type(optimizer).__name__}.step() changes {place}, which would begin anew whenever "
                "the group changes, and be another's in each process.",
                remedy="Keep it in optimizer.state[parameter], or in numbers of a parameter group.",
            )
    return moving


def check_apart(
    optimizer: torch.optim.Optimizer,
    groups: Groups,
    ndims: dict[str, int],
    device: torch.device,
    *,
    field: str,
    remedy: str,
) -> None:
    """ConfigError where the update of a tensor depends on which others are updated with it."""
    draws = _draws(groups, ndims, 3, device)
    with preserved(device):
        together = [[nn.Parameter(t.clone()) for t in group] for group in draws[0]]
        _train(optimizer, together, draws[1:])
        for number, group in enumerate(draws[0]):
            for at, tensor in enumerate(group):
                alone: list[list[nn.Parameter]] = [[] for _ in groups]
                alone[number] = [nn.Parameter(tensor.clone())]
                _train(
                    optimizer,
                    alone,
                    [[[g[at]] if n == number else [] for n, g in enumerate(draw)] for draw in draws[1:]],
                )
                if not torch.allclose(alone[number][0], together[number][at], rtol=TOLERANCE, atol=TOLERANCE):
                    raise ConfigError(
                        field=field,
                        problem=f"{type(optimizer).__name__} updates a parameter by what it knows of "
                        "the others, so that it depends on which of them are on the same rank.",
                        remedy=remedy,
                    )


def _hooks(optimizer: torch.optim.Optimizer) -> dict[str, Hashable]:
    """What hooks of `step` hold beside the optimizer, by their names."""
    return {
        getattr(hook, "__qualname__", repr(hook)): print_of(cells_of(hook)) for hook in _called(optimizer)
    }


def _called(optimizer: torch.optim.Optimizer) -> list[Any]:
    """The hooks of its steps."""
    parts = optimizer.parts.values() if isinstance(optimizer, Optimizers) else (optimizer,)
    kinds = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    return [hook for part in parts for kind in kinds for hook in vars(part).get(kind, {}).values()]


def _surroundings(optimizer: torch.optim.Optimizer) -> dict[str, Hashable]:
    """What the code of an optimizer, and of hooks of its steps, keeps outside of them."""
    parts = list(optimizer.parts.values()) if isinstance(optimizer, Optimizers) else [optimizer]
    return Surroundings.of([*map(type, parts), *map(_function, _called(optimizer))]).prints()


def _function(hook: Any) -> Any:
    return hook if hasattr(hook, "__code__") else type(hook)


def _draws(
    groups: Groups, ndims: dict[str, int], rows: int, device: torch.device
) -> list[list[list[torch.Tensor]]]:
    """First values, and a gradient for each step: by group one tensor for each number of dims in it."""
    shapes = [
        [(rows,) + (3,) * (n - 1) for n in sorted({ndims[fqn] for fqn in group} - {0})] for group in groups
    ]
    generator = torch.Generator().manual_seed(0)
    return [
        [
            [torch.randn(shape, generator=generator, dtype=torch.float64).to(device) for shape in group]
            for group in shapes
        ]
        for _ in range(STEPS + 1)
    ]


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
        _step(tried, groups, draw)


def _step(
    optimizer: torch.optim.Optimizer, groups: list[list[nn.Parameter]], draw: list[list[torch.Tensor]]
) -> None:
    for parameters, gradients in zip(groups, draw, strict=True):
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
    optimizer.step()
