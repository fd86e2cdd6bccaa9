"""Saving from the training loop: takes snapshots after a step, and makes the next update wait for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from elastic_train.checkpoint.merging import METRICS
from elastic_train.checkpoint.snapshot import Snapshot
from elastic_train.train.state.live_fragments import TensorPart, table
from elastic_train.train.state.shards import Shards

Described = Callable[[Shards], dict[str, Any]]
"""The scalars of a state, as JSON values."""


class Saver(Protocol):
    """Belongs to the training thread. `every_step`: a snapshot is wanted whenever one is possible."""

    every_step: bool

    def start(self, shards: Shards) -> None: ...
    def count_step(self) -> None:
        """A step is about to be committed; every so many of them, a snapshot is due."""
        ...

    def step_took(self, seconds: float) -> None:
        """A step ended, with its vote and its update."""
        ...

    def ready(self, timeout: float, *, storage: bool) -> bool:
        """Where no snapshot may be left out, such as one for `storage`: whether there is memory for it and
        the one before is whole, within `timeout` seconds.
        """
        ...

    def busy(self, *, storage: bool) -> bool:
        """Whether this rank has no slot for a snapshot now: it enters the vote, so that all ranks agree."""
        ...

    def fence(self) -> None:
        """Nothing may be written before this returns."""
        ...

    def take(self, shards: Shards, *, storage: bool, wait: bool) -> None: ...
    def end(self) -> None:
        """No step of this generation runs any more; what was begun is still handed on."""
        ...


def empty_snapshot(
    shards: Shards, held: Sequence[TensorPart], document: dict[str, Any], *, storage: bool
) -> Snapshot:
    """Of a rank's share of its step, before its bytes are copied."""
    assert shards.step is not None
    mesh = shards.plan.mesh
    return Snapshot(
        generation=shards.generation,
        rank=shards.rank,
        step=shards.step,
        fragments=table(held),
        document=document | {METRICS: dict(shards.metrics)},
        storage=storage,
        replica=(mesh.copy_index(shards.rank), mesh.copies),
    )
