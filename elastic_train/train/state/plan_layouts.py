"""Boxes of the parameters on each rank of a plan, computed without memory or other ranks.

The model is divided on the meta device by the code that workers run, once per rank, in a process group that
communicates with nobody.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from elastic_train.checkpoint.read_plan import ReadShare
from elastic_train.config import RunSpec
from elastic_train.planner.plan import Mesh, Plan, even_shares
from elastic_train.train.collectives.mesh_cache import forget_meshes
from elastic_train.train.collectives.mesh_position import place_on
from elastic_train.train.collectives.process_group import axes
from elastic_train.train.model.build import draw, tensors
from elastic_train.train.parallel.parallelize import check_rules, divide
from elastic_train.train.parallel.pipeline_stages import blocks_of
from elastic_train.train.state.live_fragments import cut_of, replica_of
from elastic_train.train.task import Task


def plan_on(task: Task, spec: RunSpec, mesh: Mesh) -> Plan:
    """A plan on this mesh, its stages of equally many blocks; ConfigError where the rules forbid it."""
    blocks = len(blocks_of(draw(task, spec.precision, spec.batch.seed).model, task.parallelize()).modules)
    ends = [blocks * stage // mesh.pp for stage in range(mesh.pp + 1)]
    names = tuple(f"w{rank}" for rank in range(mesh.size))
    plan = Plan(
        mesh=mesh,
        workers=names,
        nodes=names,
        shares=even_shares(spec.batch.micro_batches, mesh.dp),
        stages=tuple(itertools.pairwise(ends)) if mesh.pp > 1 else (),
    )
    check_rules(task, spec, plan)
    return plan


def held(task: Task, spec: RunSpec, plan: Plan) -> tuple[tuple[ReadShare, ...], ...]:
    """By rank, what it holds of each parameter; the first of several that hold the same reads it."""
    return tuple(tuple(_of_rank(task, spec, plan, rank)) for rank in range(plan.world_size))


def _of_rank(task: Task, spec: RunSpec, plan: Plan, rank: int) -> Iterator[ReadShare]:
    with alone(plan, rank) as mesh:
        blueprint, rules = draw(task, spec.precision, spec.batch.seed), task.parallelize()
        divided = divide(blueprint, rules, plan, rank, mesh, torch.device("meta"))
        place = place_on(mesh, plan.mesh, rank, divided.stages)
        for fqn, value in tensors(divided.blueprint.parameters).items():
            boxes = tuple(box for box, _ in cut_of(value, divided.blueprint.fused.get(fqn)))
            reads = replica_of(fqn, value, place).index == 0
            yield ReadShare(tensor=fqn, shape=tuple(value.shape), boxes=boxes, reads=reads)


@contextmanager
def alone(plan: Plan, rank: int) -> Iterator[DeviceMesh | None]:
    """The mesh of a rank of a plan, in a group that communicates with nobody."""
    if plan.world_size == 1:
        yield None
        return
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=plan.world_size)
    try:
        names = axes(plan.mesh)
        sizes = tuple(getattr(plan.mesh, name) for name in names)
        yield init_device_mesh("cpu", sizes, mesh_dim_names=names)
    finally:
        forget_meshes()
        dist.destroy_process_group()
