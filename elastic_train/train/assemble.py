"""Build a rank's shards under a plan: model, parallelism, memory, optimizer and schedule."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh

from elastic_train.config import RunSpec
from elastic_train.errors import ConfigError
from elastic_train.planner.plan import Plan
from elastic_train.train.collectives.mesh_position import place_on
from elastic_train.train.declaration.declare import registered
from elastic_train.train.declaration.loop_task import LoopTask
from elastic_train.train.model import optimizer as optimizers
from elastic_train.train.model.build import Blueprint, allocate, draw, tensors
from elastic_train.train.model.lbfgs import LBFGS
from elastic_train.train.model.loss_scale import first_scale
from elastic_train.train.model.lr_schedule import scheduler_of
from elastic_train.train.model.module_state import built
from elastic_train.train.model.moving_state import Moving
from elastic_train.train.model.optimizer import Groups
from elastic_train.train.model.optimizer_probe import check_apart, check_sharded_update, moving_of
from elastic_train.train.model.recompute import recompute_blocks
from elastic_train.train.model.several_models import Optimizers
from elastic_train.train.model.user_hooks import hang
from elastic_train.train.parallel.parallelize import divide
from elastic_train.train.parallel.pipeline_stages import blocks_of
from elastic_train.train.state.shards import Shards, WholeModel
from elastic_train.train.task import Task, average_of
from elastic_train.train.user_code_guard import UserCodeGuard


def assemble(
    task: Task,
    spec: RunSpec,
    *,
    generation: int,
    rank: int,
    plan: Plan,
    mesh: DeviceMesh | None,
    device: torch.device,
    guard: UserCodeGuard,
    drawn: Blueprint | None = None,
) -> Shards:
    """Shards with memory and without values. All ranks of the mesh must call it together. What was `drawn` of
    the model before is theirs.

    Without a mesh they are those of a whole stage, for itself.
    """
    with guard.at("building the model", 0):
        blueprint = drawn or draw(task, spec.precision, spec.batch.seed)
    whole = {**tensors(blueprint.parameters), **tensors(blueprint.buffers)}
    shapes = {fqn: tuple(tensor.shape) for fqn, tensor in whole.items()}
    whole_bytes = sum(tensor.numel() * tensor.element_size() for tensor in whole.values())
    with guard.at("building the optimizer", 0):
        described, groups = optimizers.describe(task, tensors(blueprint.parameters))  # type: ignore[arg-type]
    rules = task.parallelize()
    blocks = blocks_of(blueprint.model, rules).modules if plan.recompute != "none" else ()
    trainable = tuple(fqn for fqn, tensor in tensors(blueprint.parameters).items() if tensor.requires_grad)
    regions, stages = None, {}
    with guard.collective("dividing the model", 0):
        if mesh is not None or plan.mesh.pp > 1:
            divided = divide(blueprint, rules, plan, rank, mesh, device)
            blueprint, regions, stages = divided.blueprint, divided.regions, divided.stages
        place = place_on(mesh, plan.mesh, rank, stages)
    present = set(blueprint.model.modules())
    recompute_blocks([block for block in blocks if block in present], plan.recompute)
    allocate(blueprint, device)
    parameters = tensors(blueprint.parameters)
    hang(blueprint.hooks, parameters)
    optimizer = optimizers.move(described, groups, parameters)  # type: ignore[arg-type]
    with guard.collective("trying the optimizer", 0):
        ndims = {fqn: len(shapes[fqn]) for group in groups for fqn in group}
        moving = moving_of(optimizer, groups, ndims, device)
        moving.capture(optimizer)
        _check_parts(spec, plan, optimizer, groups, ndims, device, moving)
        for axis in ("dp_shard", "tp"):
            if mesh is not None and getattr(plan.mesh, axis) > 1:
                check_sharded_update(optimizer, groups, ndims, mesh[axis], device)
    # After the trial: a scheduler hooks itself into optimizer.step.
    with guard.at("building the schedule", 0):
        schedule = scheduler_of(task.schedule(optimizer), optimizer)
    average = average_of(task)
    if average is not None and spec.optimizer_in_backward:
        raise ConfigError(
            field="optimizer_in_backward",
            problem="the task keeps an average of its parameters, which is moved once per step, after all of "
            "them.",
            remedy="Leave optimizer_in_backward off, or average() out of the task.",
        )
    buffers, found = tensors(blueprint.buffers), None
    if isinstance(task, LoopTask):
        with guard.at("declaring what is registered", 0):
            found = registered(task.loop, blueprint.model)
        buffers |= found.tensors
        shapes |= {fqn: tuple(tensor.shape) for fqn, tensor in found.tensors.items()}
    return Shards(
        generation=generation,
        rank=rank,
        plan=plan,
        blueprint=blueprint,
        whole=WholeModel(
            shapes=shapes,
            groups=groups,
            trainable=trainable,
            aliases=blueprint.parameters.aliases,
            fused=blueprint.fused,
            nbytes=whole_bytes,
        ),
        place=place,
        regions=regions,
        parameters=parameters,  # type: ignore[arg-type]
        buffers=buffers,
        registered=found,
        optimizer=optimizer,
        moving=moving,
        built=built(blueprint.model),
        schedule=schedule,
        scale=first_scale(spec),
        decay=average.decay if average is not None else None,
        device=device,
    )


def _check_parts(
    spec: RunSpec,
    plan: Plan,
    optimizer: torch.optim.Optimizer,
    groups: Groups,
    ndims: dict[str, int],
    device: torch.device,
    moving: Moving,
) -> None:
    """ConfigError for an optimizer that must see all parameters at once, where it would see some."""
    for name, part in optimizer.parts.items() if isinstance(optimizer, Optimizers) else ():
        if isinstance(part, LBFGS) and plan.mesh.dp_shard > 1:
            raise ConfigError(
                field="parallelism.dp_shard",
                problem=f"the optimizer {name!r} is L-BFGS, which needs parameters whole.",
                remedy="Use Parallelism(dp_shard=1), or another optimizer.",
            )
    if plan.mesh.pp > 1:
        remedy = "Choose another optimizer, or use Parallelism(pp=1)."
        check_apart(optimizer, groups, ndims, device, field="parallelism.pp", remedy=remedy)
    if spec.optimizer_in_backward and moving.names:
        names = ", ".join(sorted({repr(entry) for _, _, entry in moving.names}))
        raise ConfigError(
            field="optimizer_in_backward",
            problem=f"{type(optimizer).__name__} counts its steps beside the state of its parameters "
            f"({names}), and would count each of its partial updates.",
            remedy="Choose another optimizer, or leave optimizer_in_backward out.",
        )
