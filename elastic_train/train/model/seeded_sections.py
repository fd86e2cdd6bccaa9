"""Seeded generators for what is not part of a step: a module's init, the loading of a sample."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from elastic_train.train.model import rng


@contextmanager
def module_init(seed: int, fqn: str, device: torch.device) -> Iterator[None]:
    """Initialise one module: what it draws depends on the seed and its name alone."""
    with rng.preserved(device):
        rng.seed_all(rng.derive(seed, "module", fqn), device)
        yield


@contextmanager
def sample(seed: int, epoch: int, index: int) -> Iterator[None]:
    """Load one sample; a `Seeding` of the loader."""
    with rng.preserved():
        rng.seed_sample(seed, epoch, index)
        yield
