"""Where the axes of data are fixed to fewer ranks than there are workers, the others get stages."""

from __future__ import annotations

import pytest

import elastic_train as et
from benchmarks.problem import Problem
from elastic_train.cluster.driver.run_planner import make_planner, shape_of
from elastic_train.config import Parallelism, RunSpec
from elastic_train.planner.plan import Mesh, WorkerSlot
from elastic_train.planner.question import Planned, Question

pytestmark = pytest.mark.ring0
NODE = {"Alive": True, "Resources": {"CPU": 1.0, "memory": 8e9}}


def mesh_of(workers: int, **axes: int) -> Mesh:
    """Of the plan of a small Llama on so many of at most two workers."""
    spec = RunSpec(
        name="planned",
        storage_path="memory://planned",
        batch=et.Batch(global_size=24, micro_size=2),
        max_steps=100,
        min_workers=1,
        max_workers=2,
        parallelism=Parallelism(**axes),
    )
    task, slots = Problem(), [WorkerSlot(worker=f"w{i}", node=f"n{i}") for i in range(workers)]
    planner = make_planner(task, spec, shape_of(task, spec), [NODE, NODE])
    planned = planner(Question(worker_slots=tuple(slots)))
    assert isinstance(planned, Planned), planned.reason
    return planned.plan.mesh


def test_a_worker_that_the_axes_of_data_leave_idle_gets_a_stage() -> None:
    assert mesh_of(1, dp_replicate=1, dp_shard=1, tp=1) == Mesh()
    assert mesh_of(2, dp_replicate=1, dp_shard=1, tp=1) == Mesh(pp=2)


def test_nobody_is_asked_for_more_where_every_worker_has_its_part_or_every_axis_is_fixed() -> None:
    assert mesh_of(2, dp_replicate=2, dp_shard=1) == Mesh(dp_replicate=2)
    assert mesh_of(2, dp_replicate=1) == Mesh(dp_shard=2)
    assert mesh_of(2, dp_replicate=1, dp_shard=1, tp=1, pp=1) == Mesh()
