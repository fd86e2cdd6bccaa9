"""Divide the model over the mesh: whole on every rank, or sharded with FSDP2.

With `dp_shard` 1 the modules stay as they are and the step reduces gradients itself. Otherwise each unit is
gathered for its forward and backward and freed after; gradients are summed, never averaged.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from elastic_train.errors import ConfigError
from elastic_train.planner.plan import Mesh
from elastic_train.train.build import Blueprint, tensors
from elastic_train.train.names import canonical
from elastic_train.train.task import Rules


def divide(blueprint: Blueprint, rules: Rules, plan_mesh: Mesh, mesh: DeviceMesh) -> None:
    """Shard the meta model in place where the plan says so."""
    if plan_mesh.dp_shard == 1:
        return
    parameters = tensors(blueprint.parameters)
    # FSDP2 cuts along dim 0 and refuses tensors without one: they stay whole and are reduced like replicas.
    whole = {p for p in parameters.values() if p.ndim == 0 and isinstance(p, nn.Parameter)}
    data = mesh["dp_replicate", "dp_shard"] if plan_mesh.dp_replicate > 1 else mesh["dp_shard"]
    for unit in (*_units(blueprint, rules), blueprint.model):
        fully_shard(unit, mesh=data, ignored_params=whole)
    for module in blueprint.model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            # Ranks may take different branches: without this their reductions would differ in size.
            module.set_reduce_scatter_unused_params(True, recurse=False)


def sync_gradients(model: nn.Module, on: bool) -> None:
    """Whether the next backward reduces the gradient; it only accumulates otherwise."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(on)


def _units(blueprint: Blueprint, rules: Rules) -> Iterator[nn.Module]:
    """The modules that are gathered alone, innermost first."""
    named = [(canonical(path), module) for path, module in blueprint.model.named_modules() if path]
    if rules.units:
        for pattern in rules.units:
            if not any(fnmatch.fnmatchcase(fqn, pattern) for fqn, _ in named):
                raise ConfigError(
                    field="task.parallelize", problem=f"no module matches the unit {pattern!r}."
                )
        chosen = [m for fqn, m in named if any(fnmatch.fnmatchcase(fqn, p) for p in rules.units)]
    else:
        blocks = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
        chosen = [child for _, module in named for child in module.children() if isinstance(module, blocks)]
        if isinstance(blueprint.model, nn.Sequential):
            chosen += list(blueprint.model.children())
    tied = _tied(blueprint)
    seen: set[int] = set()
    for module in reversed(chosen):
        own = {id(p) for p in module.parameters()}
        # What is tied to a tensor outside must be gathered with it, by the root.
        if own and not own & tied and id(module) not in seen:
            seen.add(id(module))
            yield module


def _tied(blueprint: Blueprint) -> set[int]:
    """Parameters that hang in more than one module."""
    values = tensors(blueprint.parameters)
    return {
        id(values[fqn])
        for fqn, slots in blueprint.parameters.slots.items()
        if len({id(s.module) for s in slots}) > 1
    }


def compute_in(model_device: torch.device, bf16: bool) -> torch.autocast:
    """The context in which forward runs: bfloat16 arithmetic over float32 masters, or as it is."""
    return torch.autocast(model_device.type, dtype=torch.bfloat16, enabled=bf16)
