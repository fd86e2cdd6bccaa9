"""Ports run on a pool of processes."""

from tests.process_pool import pool, shared_pool

__all__ = ["pool", "shared_pool"]
