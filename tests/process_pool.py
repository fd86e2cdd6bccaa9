"""One pool of processes for all tests of the room; a test that ends processes leaves them to be replaced."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from elastic_train.testing.gloo_pool import GlooPool, PoolError
from elastic_train.train.reclaim import reclaim, spare_what_exists


@pytest.fixture(scope="session")
def _shared_pool() -> Iterator[GlooPool]:
    with GlooPool(4) as pool:
        yield pool


def leave_group(state: dict[str, Any]) -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    if "undo" in state:  # what a test set in the process itself
        state["undo"]()
    for name in set(state) - {"index"}:
        del state[name]
    reclaim()  # groups have threads, and the pool lives long
    spare_what_exists()


@pytest.fixture
def pool(_shared_pool: GlooPool) -> Iterator[GlooPool]:
    """Four living processes without a group, whatever the test before left behind."""
    for rank in range(_shared_pool.size):
        if not _shared_pool.alive(rank):
            _shared_pool.restart(rank)
    yield _shared_pool
    for rank in range(_shared_pool.size):
        if _shared_pool.alive(rank):
            try:
                _shared_pool.run(leave_group, ranks=[rank], timeout=30)
            except PoolError:
                _shared_pool.kill(rank)
