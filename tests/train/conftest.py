"""One pool of processes for all tests of the room; a test that ends processes leaves them to be replaced."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from elastic_train.testing.gloo_pool import GlooPool


@pytest.fixture(scope="session")
def _shared_pool() -> Iterator[GlooPool]:
    with GlooPool(4) as pool:
        yield pool


@pytest.fixture
def pool(_shared_pool: GlooPool) -> GlooPool:
    """Four living processes."""
    for rank in range(_shared_pool.size):
        if not _shared_pool.alive(rank):
            _shared_pool.restart(rank)
    return _shared_pool


@pytest.fixture(scope="session")
def _generations() -> Iterator[int]:
    return itertools.count(1)


@pytest.fixture
def new_generation(_generations: Iterator[int]) -> Iterator[int]:
    """Numbers of generations that were never formed in the pool's store: use next()."""
    return _generations
