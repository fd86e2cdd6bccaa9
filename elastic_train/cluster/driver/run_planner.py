"""Build the planner of a run for the present cluster, on the driver, before anything is started.

A run is data-parallel as long as that fits. The model's layers are looked at only where a person fixes
another axis, or the axes of data to fewer ranks than there may be workers, or where some number of workers
within the bounds has too little memory for data-parallel plans.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from elastic_train.cluster.label_selectors import selected
from elastic_train.config import RunSpec
from elastic_train.errors import ConfigError
from elastic_train.planner.accelerators import ACCELERATORS, PLAIN, PLAIN_FLOPS_PER_S, RAY_NAMES, Accelerator
from elastic_train.planner.model_shape import ModelShape
from elastic_train.planner.plan import Infeasible, WorkerSlot
from elastic_train.planner.question import Planned, Question
from elastic_train.planner.search import Search, opens_the_model, planner_for
from elastic_train.recovery.selective_logging import Selective, steps_between
from elastic_train.train.declaration.loop_task import LoopTask
from elastic_train.train.model.meta_shape import model_shape
from elastic_train.train.parallel.parallelize import check_rules
from elastic_train.train.profile import profiled_shape
from elastic_train.train.state.sharded_trial import sharding_fails
from elastic_train.train.task import Task
from elastic_train.train.user_code_guard import UserCodeGuard

FLOPS_PER_S = {"cpu": PLAIN_FLOPS_PER_S, "gpu": 1e14}
"""What a worker computes, until a run measures it: candidates are compared, nothing is promised."""

_GUARD = UserCodeGuard(worker="the driver", node="", rank=-1, generation=0, broken=lambda: False)


def shape_of(task: Task, spec: RunSpec) -> ModelShape:
    """The model's shape; what the task's own code raises is reported as the workers would report it."""
    with _GUARD.at("building the model", 0):
        return model_shape(task, spec)


def make_planner(
    task: Task, spec: RunSpec, shape: ModelShape, nodes: Sequence[Mapping[str, Any]]
) -> Search | Selective:
    """The run's planner; ConfigError where no plan is possible even on all the workers asked for.

    `nodes` are those of the cluster, as Ray describes them.
    """
    per_node, memory_bytes = _room(spec, nodes)
    known = _accelerator(spec, nodes)
    worker_slots = tuple(
        WorkerSlot(worker=f"w{i}", node=f"n{i // per_node}") for i in range(spec.max_workers)
    )
    hardware = PLAIN
    rates = {"flops_per_s": FLOPS_PER_S["gpu" if spec.gpus_per_worker else "cpu"]}
    if known is not None:
        hardware = known.hardware
        rates = {"flops_per_s": known.flops_per_s, "memory_bytes_per_s": known.memory_bytes_per_s}
    hardware = replace(hardware, memory_bytes=memory_bytes)
    planner = planner_for(spec, shape=shape, memory_bytes=memory_bytes, hardware=hardware)
    opens = opens_the_model(spec.parallelism, spec.max_workers) and not isinstance(task, LoopTask)
    requested = spec.parallelism.divides_the_model or opens
    few, all_ = Question(worker_slots=worker_slots[: spec.min_workers]), Question(worker_slots=worker_slots)
    with _GUARD.at("building the model", 0):
        if requested or any(isinstance(planner(asked), Infeasible) for asked in (few, all_)):
            shape = profiled_shape(task, spec, **rates)
            planner = planner_for(spec, shape=shape, memory_bytes=memory_bytes, hardware=hardware)
        planned = planner(all_)
        if any(_shards(planner(asked)) for asked in (few, all_)):
            reason = sharding_fails(task, spec)
            if reason is not None:
                return _whole(task, spec, shape, nodes, reason)
        if isinstance(planned, Planned):
            check_rules(task, spec, planned.plan)
            return _selective(planner, spec, hardware.between.bytes_per_s)
    raise ConfigError(field="parallelism" if requested else "scaling_config", problem=planned.reason)


def _shards(answer: Planned | Infeasible) -> bool:
    return isinstance(answer, Planned) and answer.plan.mesh.dp_shard > 1


def _whole(
    task: Task, spec: RunSpec, shape: ModelShape, nodes: Sequence[Mapping[str, Any]], reason: str
) -> Search | Selective:
    """The planner of a model that does not run on sharded parameters; ConfigError where there is none."""
    remedy = (
        "Call modules instead of using their parameters from outside, name the module that does so as a "
        "unit, in Rules(units=...), or keep parameters whole, with Parallelism(dp_shard=1) and more memory "
        "per worker."
    )
    problem = f"the model does not run on sharded parameters ({reason})"
    if spec.parallelism.dp_shard is not None:
        raise ConfigError(field="parallelism.dp_shard", problem=f"{problem}.", remedy=remedy)
    apart = replace(spec, parallelism=replace(spec.parallelism, dp_shard=1))
    try:
        return make_planner(task, apart, shape, nodes)
    except ConfigError as error:
        raise ConfigError(
            field="parallelism.dp_shard",
            problem=f"{problem}, and whole ones are not possible: {error.problem}",
            remedy=remedy,
        ) from error


def _selective(planner: Search, spec: RunSpec, bytes_s: float) -> Search | Selective:
    """With the choice of what is logged, where there is a budget for it and stages may be planned."""
    logs = spec.boundary_logs
    if logs is None or logs.budget_bytes is None or planner.shape is None or not planner.shape.layers:
        return planner
    return Selective(
        planner=planner,
        shape=planner.shape,
        micro_batches=spec.batch.micro_batches,
        interval=steps_between(spec.checkpoints),
        bytes_s=bytes_s,
        budget=logs.budget_bytes,
    )


def _accelerator(spec: RunSpec, nodes: Sequence[Mapping[str, Any]]) -> Accelerator | None:
    """What is known of the GPUs of a run's nodes, where they are all of one known kind.

    Their memory is not assumed: variants of one name differ, and a refused plan may be one that fits.
    """
    if not spec.gpus_per_worker:
        return None
    prefix = "accelerator_type:"
    found = {
        key.removeprefix(prefix)
        for n in nodes
        if n["Alive"]
        for key in n["Resources"]
        if key.startswith(prefix)
    }
    names = {spec.accelerator} if spec.accelerator else found
    name = RAY_NAMES.get(str(*names)) if len(names) == 1 else None
    return None if name is None else ACCELERATORS[name]


def _room(spec: RunSpec, nodes: Sequence[Mapping[str, Any]]) -> tuple[int, int | None]:
    """Workers that the largest node has room for, and the memory of a worker; None where it isn't known."""
    there = (n for n in nodes if n["Alive"] and selected(n.get("Labels", {}), spec.labels))
    resources = [node["Resources"] for node in there]
    kind = f"accelerator_type:{spec.accelerator}"
    resources = [r for r in resources if spec.accelerator is None or kind in r]
    able = [r for r in resources if r.get("CPU", 0.0) >= spec.cpus_per_worker]
    slots = [int(r["CPU"] / spec.cpus_per_worker) if spec.cpus_per_worker else 1 for r in able]
    alone = spec.placement == "STRICT_SPREAD"
    if spec.gpus_per_worker:
        most = max((int(r.get("GPU", 0.0) / spec.gpus_per_worker) for r in able), default=1)
        return (1 if alone else most or 1), None
    slots = [min(number, 1) for number in slots] if alone else slots
    shares = [float(r["memory"]) / max(1, n) for r, n in zip(able, slots, strict=True) if r.get("memory")]
    return max(slots, default=1), int(min(shares)) if shares else None
