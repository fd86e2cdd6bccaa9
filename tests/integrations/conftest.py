"""What other libraries' models are trained on here: a pool of processes."""

from tests.process_pool import pool, shared_pool

__all__ = ["pool", "shared_pool"]
