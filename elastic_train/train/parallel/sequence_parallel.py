"""Sequence parallelism: outside of its projections each tp rank works on a part of the positions.

Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models (MLSys 2023), section 4.2.2,
with torch's parallel styles. Norms and masks are computed once instead of on every rank, and what they keep
for backward is divided. Positions are dim 1 of an activation. Stages give each other whole activations, so a
log of them serves any plan.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from elastic_train.errors import ConfigError
from elastic_train.train.model.build import Blueprint
from elastic_train.train.model.positions import POSITIONS
from elastic_train.train.model.tensor_names import canonical
from elastic_train.train.task import Positions, Rules, Style


def check_sequence(model: nn.Module, rules: Rules, chosen: Mapping[str, Style]) -> None:
    """ConfigError where the rules do not say enough: `chosen` are the modules that tp cuts."""
    if not rules.sequence:
        raise ConfigError(
            field="task.parallelize",
            problem="nothing says which modules work on each position by itself.",
            remedy="Name them with Rules(sequence=...).",
        )
    names = [canonical(path) for path, _ in model.named_modules()]
    for pattern, kind in rules.sequence.items():
        if kind not in ("alone", "gathered"):
            raise ConfigError(
                field="task.parallelize", problem=f"{kind!r} of {pattern!r} is neither alone nor gathered."
            )
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            raise ConfigError(field="task.parallelize", problem=f"no module matches {pattern!r}.")
    gathered = _matching(names, rules, "gathered")
    for fqn, style in chosen.items():
        if style != "row" and not any(fqn == name or fqn.startswith(f"{name}.") for name in gathered):
            raise ConfigError(
                field="task.parallelize",
                problem=f"{fqn!r} needs all positions and is in no module whose inputs are gathered.",
                remedy="Name it, or the module around it, as 'gathered' in Rules(sequence=...).",
            )


def cut_positions(blueprint: Blueprint, rules: Rules, mesh: DeviceMesh, *, first: bool, last: bool) -> None:
    """Gather the inputs of what needs all positions; whole activations at the ends of a stage.

    To be called before the projections are cut.
    """
    named = {canonical(path): module for path, module in blueprint.model.named_modules()}
    for fqn in _matching(named, rules, "gathered"):
        if not isinstance(named[fqn], nn.Identity):
            named[fqn].register_forward_pre_hook(partial(_gather, mesh))
    group = mesh.get_group()
    if not first:
        blueprint.model.register_forward_pre_hook(
            lambda _, inputs: (slice_positions(inputs[0], group), *inputs[1:])
        )
    if not last:
        hand_on_all_positions(blueprint.model, group)


def check_positions(module: nn.Module, fqn: str, ranks: int) -> None:
    """From now on refuse inputs of the module whose positions do not divide."""

    def check(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        positions = inputs[0].shape[POSITIONS]
        if positions % ranks:
            legal = [n for n in range(1, positions + 1) if positions % n == 0]
            raise ConfigError(
                field="parallelism.tp",
                problem=f"{ranks} ranks do not divide the {positions} positions that {fqn!r} works on.",
                remedy=f"Legal are {', '.join(map(str, legal))}; or leave Rules(sequence=...) out.",
            )

    module.register_forward_pre_hook(check)


def slice_positions(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's positions of an activation that every rank has; the gradient is whole again."""
    return _Slice.apply(whole, group)  # type: ignore[return-value]


def join_positions(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All positions of an activation, whose gradient is the same on every rank."""
    return _Whole.apply(part, group)  # type: ignore[return-value]


def hand_on_all_positions(model: nn.Module, group: dist.ProcessGroup) -> None:
    """From now on the model's output, which is a part of the positions, is whole."""

    def hook(_: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        return join_positions(output, group)

    model.register_forward_hook(hook)


def alone(blueprint: Blueprint, rules: Rules) -> frozenset[str]:
    """Parameters that work on a part of the positions, so that each rank sees a part of their gradients."""
    paths = {id(module): canonical(path) for path, module in blueprint.model.named_modules()}
    modules = set(_matching(paths.values(), rules, "alone"))
    return frozenset(
        fqn
        for fqn, slots in blueprint.parameters.slots.items()
        if any(_within(paths.get(id(slot.module)), modules) for slot in slots)
    )


def sum_over_positions(parameters: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
    """Sum local gradients, by name, over the tp ranks. All of them call it with the same names."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for gradient in parameters.values():
        by_dtype.setdefault(gradient.dtype, []).append(gradient)
    for gradients in by_dtype.values():
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(flat, group=group)
        parts = flat.split([gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view(gradient.shape))


def _matching(names: Iterable[str], rules: Rules, kind: Positions) -> tuple[str, ...]:
    patterns = [pattern for pattern, found in rules.sequence.items() if found == kind]
    return tuple(name for name in names if any(fnmatch.fnmatchcase(name, p) for p in patterns))


def _within(fqn: str | None, modules: set[str]) -> bool:
    return fqn is not None and any(fqn == name or fqn.startswith(f"{name}.") for name in modules)


def _gather(mesh: DeviceMesh, _module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """As torch's PrepareModuleInput, whatever else the module takes beside its first argument."""
    part = DTensor.from_local(inputs[0], mesh, (Shard(POSITIONS),), run_check=False)
    return part.redistribute(placements=(Replicate(),)), *inputs[1:]


class _Slice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _part(whole, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _joined(gradients[0], ctx.group), None


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _joined(part, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _part(gradients[0], ctx.group), None


def _part(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    return whole.chunk(group.size(), POSITIONS)[group.rank()].contiguous()


def _joined(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(parts, part.contiguous(), group=group)
    return torch.cat(parts, POSITIONS)
