"""Processes that have the rehearsal device; in the tests' own it would be the accelerator of every test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from elastic_train.testing.gloo_pool import GlooPool
from elastic_train.testing.rehearsal.build import load_library, missing
from elastic_train.testing.rehearsal.device import NAME
from tests.process_pool import pool

__all__ = ["pool"]

LONGEST_S = 2e-4
"""How long whatever runs on a queue is kept back at the most, where tests of training run."""


def keep_back(state: dict[str, Any], seconds: float) -> None:
    load_library().set_delay(seconds, state["index"])


@pytest.fixture(scope="session")
def shared_pool() -> Iterator[GlooPool]:
    if why := missing():
        pytest.skip(f"no rehearsal device: {why}")
    load_library()  # compiled once, before the processes wait for it
    with GlooPool(4, NAME) as pool:
        yield pool


@pytest.fixture
def late_queues(pool: GlooPool) -> Iterator[None]:
    """What no event orders comes in another order every time."""
    pool.run(keep_back, LONGEST_S)
    yield
    for rank in range(pool.size):
        if pool.alive(rank):
            pool.control(rank, keep_back, 0.0)
