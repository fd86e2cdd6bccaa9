"""Plans of eight ranks, in which three axes meet, compute what one process computes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from elastic_train.config import Batch
from elastic_train.planner.plan import Mesh
from elastic_train.testing.gloo_pool import GlooPool
from tests.tasks.chain import ChainTask
from tests.train.equality import Plans, check, spec

pytestmark = [pytest.mark.ring2, pytest.mark.timeout(400)]

SPREAD = {"sequence_parallel": True}
DENSE: Plans = [
    (Mesh(pp=2, dp_shard=2, tp=2), SPREAD),
    (Mesh(pp=2, dp_replicate=2, dp_shard=2), {"recompute": "full"}),
    (Mesh(pp=4, tp=2), {}),
    (Mesh(dp_replicate=2, tp=4), {}),
]
EXPERTS: Plans = [
    (Mesh(pp=2, dp_shard=2, ep=2, tp=2), SPREAD),
    (Mesh(dp_replicate=2, dp_shard=4, ep=2), {}),
]
THE_OTHERS: Plans = [
    (Mesh(dp_replicate=2, dp_shard=2, tp=2), {}),
    (Mesh(pp=2, dp_replicate=2, tp=2), {"recompute": "selective"}),
    (Mesh(pp=4, dp_replicate=2), {}),
    (Mesh(pp=4, dp_shard=2), {}),
    (Mesh(dp_shard=8), {}),
    (Mesh(dp_replicate=8), {}),
    (Mesh(dp_shard=2, tp=4), {}),
    (Mesh(pp=2, tp=4), {}),
]


@pytest.fixture
def eight(pool: GlooPool) -> Iterator[GlooPool]:
    """The pool with four processes more."""
    size = pool.size
    pool.resize(8)
    yield pool
    pool.resize(size)


def test_six_plans_of_eight_ranks_equal_the_reference(eight: GlooPool) -> None:
    run = spec(batch=Batch(global_size=13, micro_size=2, seed=11), max_steps=2, max_workers=8)
    check(eight, ChainTask(samples=20), DENSE, run)
    check(eight, ChainTask(samples=20, experts=6, hidden=10, tied=False), EXPERTS, run)


@pytest.mark.matrix
def test_the_other_plans_of_eight_ranks_do_too(eight: GlooPool) -> None:
    run = spec(batch=Batch(global_size=13, micro_size=1, seed=11), max_workers=8)
    check(eight, ChainTask(), THE_OTHERS, run)
