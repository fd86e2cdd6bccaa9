"""PeerTier protocol: where a saver's snapshots go (a node's peer store, or directly to storage)."""

from __future__ import annotations

from typing import Protocol

from elastic_train.checkpoint.engine.arena import Arena
from elastic_train.checkpoint.snapshot import Snapshot


class PeerTier(Protocol):
    """Where whole snapshots go, and whether one can be taken now.

    `every_step`: one is wanted for peer memory whenever it is possible, and not for storage alone.
    `deliver` and `dropped` are called on threads of the snapshot engine, the rest on the training thread.
    """

    every_step: bool

    @property
    def binding(self) -> bool:
        """Whether a snapshot is due by a number of steps, so that none may be left out."""
        ...

    def memory(self, generation: int, size: int) -> Arena:
        """Slots of `size` bytes for a generation's snapshots, before its first step."""
        ...

    def count_step(self) -> None:
        """One more step is about to be committed since the last snapshot began."""
        ...

    def step_took(self, seconds: float) -> None:
        """A step ended, with its vote and its update: longer beside a snapshot than without."""
        ...

    def ready(self, timeout: float) -> bool:
        """Where no snapshot may be left out: whether the one before is whole, within `timeout` seconds."""
        ...

    def crowded(self, *, storage: bool) -> bool:
        """Whether a snapshot now would meet one that is not complete, or comes sooner than it is worth."""
        ...

    def begun(self, step: int) -> None:
        """A snapshot of this step begins: the vote has shown that every rank takes it."""
        ...

    def dropped(self, step: int) -> None:
        """The snapshot that began at this step came to nothing."""
        ...

    def deliver(self, snapshot: Snapshot) -> None:
        """A snapshot is whole. It is the tier's from now on, which releases its buffer. Does not wait."""
        ...
