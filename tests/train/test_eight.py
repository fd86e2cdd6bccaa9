"""Plans of eight ranks, in which three axes meet, compute what one process computes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from elastic_train.config import Batch, RunSpec
from elastic_train.planner.plan import Mesh
from elastic_train.testing.chain import ChainTask
from elastic_train.testing.gang import Gang
from elastic_train.testing.gloo_pool import GlooPool
from elastic_train.testing.reference import assert_state_near, reference

pytestmark = [pytest.mark.ring2, pytest.mark.trial]

SPLITS = {1: (), 2: ((0, 1), (1, 4)), 4: ((0, 1), (1, 2), (2, 3), (3, 4))}

SPREAD = {"sequence_parallel": True}
DENSE: list[tuple[Mesh, dict[str, Any]]] = [
    (Mesh(pp=2, dp_shard=2, tp=2), SPREAD),
    (Mesh(dp_replicate=2, dp_shard=2, tp=2), {}),
    (Mesh(pp=2, dp_replicate=2, dp_shard=2), {"recompute": "full"}),
    (Mesh(pp=4, tp=2), {}),
    (Mesh(dp_replicate=2, tp=4), {}),
    (Mesh(dp_shard=8), {}),
]
EXPERTS: list[tuple[Mesh, dict[str, Any]]] = [
    (Mesh(pp=2, dp_shard=2, ep=2, tp=2), SPREAD),
    (Mesh(dp_replicate=2, dp_shard=4, ep=2), {}),
]


@pytest.fixture(scope="module")
def eight() -> Iterator[GlooPool]:
    with GlooPool(8) as made:
        yield made


@pytest.mark.parametrize(
    ("task", "plans"),
    [(ChainTask(), DENSE), (ChainTask(experts=6, hidden=10, tied=False), EXPERTS)],
    ids=["dense", "experts"],
)
def test_plans_of_eight_ranks_equal_the_reference(
    eight: GlooPool, new_generation: Iterator[int], task: ChainTask, plans: list[tuple[Mesh, dict[str, Any]]]
) -> None:
    run = RunSpec(
        name="eight",
        storage_path="/nowhere",
        batch=Batch(global_size=13, micro_size=2, seed=11),
        max_steps=3,
        min_workers=1,
        max_workers=8,
        precision="fp64",
        clip_norm=2.0,
    )
    gang = Gang(eight, new_generation, task, run)
    gang.form(gang.plan(1, 1))
    expected = reference(task, run, gang.whole())
    for mesh, changes in plans:
        gang.form(gang.plan_on(mesh, stages=SPLITS[mesh.pp], **changes))
        reports = gang.run()
        np.testing.assert_allclose([r.loss for r in reports], expected.losses, rtol=1e-9, err_msg=str(mesh))
        np.testing.assert_allclose(
            [r.grad_norm for r in reports], expected.norms, rtol=1e-9, err_msg=str(mesh)
        )
        assert_state_near(gang.whole(), expected.state)
