"""Seeded generators for what is not part of a step: a module's init, the loading and collating of samples."""

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


@contextmanager
def gradient(seed: int, step: int, fqn: str, device: torch.device) -> Iterator[None]:
    """Edit one gradient: what is drawn depends on the step and the parameter's name."""
    with rng.preserved(device):
        rng.seed_all(rng.derive(seed, "gradient", step, fqn), device)
        yield


@contextmanager
def building(seed: int) -> Iterator[None]:
    """Build the data set: what it draws while it is made is the same in every process."""
    with rng.preserved():
        rng.seed_all(rng.derive(seed, "data set"))
        yield


@contextmanager
def collating(seed: int, step: int, index: int) -> Iterator[None]:
    """Make a micro-batch of its samples: its draws depend on the step and its index, not on who makes it."""
    with rng.preserved():
        rng.seed_all(rng.derive(seed, "collate", step, index))
        yield
