"""Context parallelism computes what one process computes, whatever it is combined with."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_train.planner.plan import Mesh
from elastic_train.testing.gloo_pool import GlooPool
from tests.tasks.chain import ChainTask
from tests.train.equality import check

pytestmark = pytest.mark.ring2


SPREAD = {"sequence_parallel": True}
PLANS: list[tuple[Mesh, dict[str, Any]]] = [
    (Mesh(cp=4), {"recompute": "full"}),
    (Mesh(cp=2, tp=2), SPREAD),
    (Mesh(pp=2, cp=2), {}),
    (Mesh(cp=2), {"recompute": "selective"}),
    (Mesh(cp=2, tp=2), {"recompute": "full"}),
    (Mesh(dp_shard=2, cp=2), {}),
    (Mesh(dp_replicate=2, cp=2), {}),
]


def test_positions_divided_over_cp_compute_what_one_process_computes(pool: GlooPool) -> None:
    check(pool, ChainTask(length=8, kv_heads=2, evaluate_every=2), PLANS[:3])


@pytest.mark.matrix
def test_positions_are_divided_under_every_kind_of_plan(pool: GlooPool) -> None:
    check(pool, ChainTask(length=8, kv_heads=2, evaluate_every=2), PLANS[3:])
