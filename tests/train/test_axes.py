"""Tensor and pipeline parallel plans compute what one process computes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from elastic_train.config import Batch, RunSpec
from elastic_train.planner.plan import Mesh
from elastic_train.testing.chain import ChainTask
from elastic_train.testing.gang import Gang
from elastic_train.testing.gloo_pool import GlooPool
from elastic_train.testing.reference import assert_state_near, reference

pytestmark = pytest.mark.ring2

SPLITS = {1: (), 2: ((0, 1), (1, 4)), 3: ((0, 2), (2, 4), (4, 4)), 4: ((0, 1), (1, 2), (2, 3), (3, 4))}
"""Blocks by stage: uneven, and with a stage that is the head alone."""


def spec(**changes: object) -> RunSpec:
    return RunSpec(
        **{
            "name": "chain",
            "storage_path": "/nowhere",
            "batch": Batch(global_size=13, micro_size=3, seed=11),
            "max_steps": 5,
            "min_workers": 1,
            "max_workers": 4,
            "precision": "fp64",
            "clip_norm": 2.0,
            **changes,
        }
    )


def check(pool: GlooPool, generations: Iterator[int], task: ChainTask, meshes: list[Mesh]) -> None:
    run = spec()
    gang = Gang(pool, generations, task, run)
    gang.form(gang.plan(1, 1))
    initial = gang.whole()
    expected = reference(task, run, initial)
    for mesh in meshes:
        gang.form(gang.plan_on(mesh, stages=SPLITS[mesh.pp]))
        started = gang.whole()
        assert started.keys() == initial.keys(), mesh
        assert all(np.array_equal(started[name], initial[name]) for name in initial), mesh
        reports = gang.run()
        losses, norms = [r.loss for r in reports], [r.grad_norm for r in reports]
        np.testing.assert_allclose(losses, expected.losses, rtol=1e-9, err_msg=str(mesh))
        np.testing.assert_allclose(norms, expected.norms, rtol=1e-9, err_msg=str(mesh))
        assert_state_near(gang.whole(), expected.state)


@pytest.mark.parametrize("tied", [True, False])
def test_tensor_parallel_plans_equal_the_reference(
    pool: GlooPool, new_generation: Iterator[int], tied: bool
) -> None:
    meshes = [
        Mesh(tp=2),
        Mesh(tp=4),
        Mesh(dp_replicate=2, tp=2),
        Mesh(dp_shard=2, tp=2),
    ]
    check(pool, new_generation, ChainTask(tied=tied), meshes)
