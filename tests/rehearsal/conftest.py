"""Processes that have the rehearsal device; in the tests' own it would be the accelerator of every test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from elastic_train.testing.gloo_pool import GlooPool
from elastic_train.testing.rehearsal.build import load_library, missing
from elastic_train.testing.rehearsal.device import NAME
from tests.process_pool import pool

__all__ = ["pool"]


@pytest.fixture(scope="session")
def shared_pool() -> Iterator[GlooPool]:
    if why := missing():
        pytest.skip(f"no rehearsal device: {why}")
    load_library()  # compiled once, before the processes wait for it
    with GlooPool(4, NAME) as pool:
        yield pool
