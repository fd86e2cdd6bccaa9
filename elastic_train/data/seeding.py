"""Seeding around the loading of one sample."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

Seeding = Callable[[int, int, int], AbstractContextManager[object]]
"""(seed, epoch, sample id) -> a context in which every random generator is seeded by the three.

It puts the generators back at its end, because samples may be loaded in the process that trains. It is a
module-level function, so that it reaches loader processes.
"""


def unseeded(seed: int, epoch: int, sample: int) -> AbstractContextManager[object]:
    """For data sets that draw nothing."""
    return nullcontext()
