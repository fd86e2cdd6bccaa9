"""Divide the model over the mesh: into stages, then over tp and cp, then sharded with FSDP2.

With `dp_shard` 1 the modules stay as they are and the step reduces gradients itself. Otherwise each unit is
gathered for its forward and backward and freed after; gradients are summed, never averaged.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.utils.parametrize import ParametrizationList

from elastic_train.config import Precision, RunSpec
from elastic_train.errors import ConfigError
from elastic_train.planner.plan import Plan
from elastic_train.train.collectives.mesh_position import Stages
from elastic_train.train.model.build import Blueprint, draw, tensors
from elastic_train.train.model.compiled import is_compiled
from elastic_train.train.model.copies import let_copy
from elastic_train.train.model.several_models import Models
from elastic_train.train.model.tensor_names import canonical
from elastic_train.train.parallel.context_parallel import check_context, cut_context, shard_mesh
from elastic_train.train.parallel.experts import EXPERT_SHARD, check_experts, cut_experts, expert_mesh
from elastic_train.train.parallel.pipeline_stages import cut_stage
from elastic_train.train.parallel.sequence_parallel import check_sequence, cut_positions
from elastic_train.train.parallel.tensor_parallel import Regions, cut_tensors, styles
from elastic_train.train.task import Rules, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Divided:
    """This rank's part of a model. `stages` says on which stages each tensor is."""

    blueprint: Blueprint
    stages: Stages
    regions: Regions | None  # where tensor parallelism cuts activations


def divide(
    blueprint: Blueprint, rules: Rules, plan: Plan, rank: int, mesh: DeviceMesh | None, device: torch.device
) -> Divided:
    """Divide the meta model, in place, as the plan says: into stages, over tp, over dp_shard.

    Without a mesh the stage of the rank is cut out alone, as where it is replayed.
    """
    size = plan.mesh
    _check_compiled(blueprint.model, plan)
    stacks = check_experts(blueprint.model, rules, size.ep) if size.ep > 1 else {}
    chosen = styles(blueprint.model, rules, size.tp) if size.tp > 1 else {}
    spread = plan.sequence_parallel and size.tp > 1
    if spread:
        check_sequence(blueprint.model, rules, chosen)
    attention = check_context(blueprint.model, rules, size) if size.cp > 1 else ()
    stages: Stages = {}
    if size.pp > 1:
        blueprint, stages = cut_stage(blueprint, rules, plan.stages, size.coordinate(rank)["pp"])
    at = size.coordinate(rank)["pp"]
    ends = {"first": at == 0, "last": at == size.pp - 1}
    regions = None
    if spread and mesh is not None:
        cut_positions(blueprint, rules, mesh["tp"], **ends)
    if size.cp > 1 and mesh is not None:
        cut_context(blueprint, attention, mesh["cp"], device, **ends)
    if chosen and mesh is not None:
        blueprint, regions = cut_tensors(blueprint, rules, chosen, mesh["tp"], device, spread=spread)
    if size.dp_shard > 1 and mesh is not None:
        copies = ("dp_replicate",) if size.dp_replicate > 1 else ()
        if stacks:
            divided = expert_mesh(mesh, size.dp_shard, size.ep)
            own = cut_experts(blueprint, stacks, divided["ep"])
            _shard(own, divided[*copies, EXPERT_SHARD], blueprint)
        over = shard_mesh(mesh, copies) if size.cp > 1 else mesh[*copies, "dp_shard"]
        _shard((*_units(blueprint, rules), *_roots(blueprint.model)), over, blueprint)
    return Divided(blueprint=blueprint, stages=stages, regions=regions)


def _check_compiled(model: nn.Module, plan: Plan) -> None:
    """ConfigError where a plan would cut what is compiled as one."""
    axis = next((name for name in ("tp", "pp", "cp", "ep") if getattr(plan.mesh, name) > 1), None)
    if axis is not None and is_compiled(model):
        raise ConfigError(
            field=f"parallelism.{axis}",
            problem="the model, or a part of it, is compiled by torch.compile, and is cut here.",
            remedy=f"Compile models that are replicated or sharded alone, with Parallelism({axis}=1).",
        )


def check_rules(task: Task, spec: RunSpec, plan: Plan) -> None:
    """ConfigError where the task's rules do not allow the plan; nothing is started."""
    blueprint, rules = draw(task, spec.precision, spec.batch.seed), task.parallelize()
    _check_compiled(blueprint.model, plan)
    if plan.mesh.ep > 1:
        check_experts(blueprint.model, rules, plan.mesh.ep)
    if plan.mesh.tp > 1:
        chosen = styles(blueprint.model, rules, plan.mesh.tp)
        if plan.sequence_parallel:
            check_sequence(blueprint.model, rules, chosen)
    if plan.mesh.cp > 1:
        check_context(blueprint.model, rules, plan.mesh)
    if plan.mesh.pp > 1:
        cut_stage(blueprint, rules, plan.stages, 0)


def _shard(units: Iterable[nn.Module], data: DeviceMesh, blueprint: Blueprint) -> None:
    parameters = tensors(blueprint.parameters)
    # FSDP2 cuts along dim 0 and fails for tensors without one or without elements: they stay whole and are
    # reduced like replicas.
    whole = {p for p in parameters.values() if (p.ndim == 0 or not p.numel()) and isinstance(p, nn.Parameter)}
    for module in units:
        if isinstance(module, FSDPModule):
            continue  # experts that are a unit of the rules too
        _check_dtypes(module, {id(p): fqn for fqn, p in parameters.items() if p not in whole})
        fully_shard(module, mesh=data, ignored_params=whole)
        if isinstance(module, FSDPModule):
            let_copy(module)
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            # Ranks may take different branches: without this their reductions would differ in size.
            module.set_reduce_scatter_unused_params(True, recurse=False)


def _check_dtypes(unit: nn.Module, names: Mapping[int, str]) -> None:
    """ConfigError where one unit trains several dtypes, which FSDP2 finds out in the first step."""
    seen: dict[torch.dtype, str] = {}
    within = [unit]
    while within:
        module = within.pop()
        within += [child for child in module.children() if not isinstance(child, FSDPModule)]
        for parameter in module.parameters(recurse=False):
            if id(parameter) in names and parameter.requires_grad:
                seen.setdefault(parameter.dtype, names[id(parameter)])
    if len(seen) > 1:
        (one, first), (two, second), *_ = seen.items()
        raise ConfigError(
            field="parallelism.dp_shard",
            problem=f"{first!r} is {one} and {second!r} is {two}, and both are gathered in one piece.",
            remedy="Use one dtype, name the modules of another one in Rules(units=...), or keep parameters "
            "whole with Parallelism(dp_shard=1).",
        )


def sync_gradients(model: nn.Module, on: bool) -> None:
    """Whether the next backward reduces the gradient; it only accumulates otherwise."""
    for root in _roots(model):
        if isinstance(root, FSDPModule):
            root.set_requires_gradient_sync(on)


def _roots(model: nn.Module) -> list[nn.Module]:
    """What is called from outside: the model, or each of several."""
    return list(model.children()) if isinstance(model, Models) else [model]


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
        # What makes a weight is gathered with the module whose weight it is.
        chosen = [
            child
            for _, module in named
            for child in module.children()
            if isinstance(module, blocks) and not isinstance(child, ParametrizationList)
        ]
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


COMPUTED = {"bf16": torch.bfloat16, "fp16": torch.float16}


def compute_in(model_device: torch.device, precision: Precision) -> torch.autocast:
    """The context in which forward runs: arithmetic of 16 bits over float32 masters, or as it is."""
    dtype = COMPUTED.get(precision)
    return torch.autocast(model_device.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None)
