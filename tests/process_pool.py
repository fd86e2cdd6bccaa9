"""One pool of processes for all tests of a folder; a test that ends processes leaves them to be replaced."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from elastic_train.testing.gloo_pool import GlooPool, PoolError
from elastic_train.train.reclaim import reclaim, spare_what_exists


@pytest.fixture(scope="session")
def shared_pool() -> Iterator[GlooPool]:
    with GlooPool(4) as pool:
        yield pool


def leave_group(state: dict[str, Any]) -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    if "undo" in state:  # what a test set in the process itself
        state["undo"]()
    for name in set(state) - {"index", "device"}:
        del state[name]
    reclaim()  # groups have threads, and the pool lives long
    spare_what_exists()


@pytest.fixture
def pool(shared_pool: GlooPool) -> Iterator[GlooPool]:
    """Four living processes without a group, whatever the test before left behind."""
    for rank in range(shared_pool.size):
        if not shared_pool.alive(rank):
            shared_pool.restart(rank)
    yield shared_pool
    for rank in range(shared_pool.size):
        if shared_pool.alive(rank):
            try:
                shared_pool.run(leave_group, ranks=[rank], timeout=30)
            except PoolError:
                shared_pool.kill(rank)
