"""Simulated peer stores: of the last steps, each rank's part on its own node and on the next one."""

from __future__ import annotations

from collections.abc import Collection

from elastic_train.recovery.evidence import PeerSnapshot
from elastic_train.testing.simulated_group import SimulatedGroup

KEPT = 2
"""Steps that a store holds."""


class SimulatedPeers:
    """A node's store goes with its node."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[PeerSnapshot, ...]] = {}
        self.reported: set[PeerSnapshot] = set()

    def commit(self, group: SimulatedGroup) -> None:
        """Every rank's part of the step that the group committed is copied."""
        nodes = sorted({worker.node for worker in group.workers})
        new: dict[str, list[PeerSnapshot]] = {node: [] for node in nodes}
        for rank, worker in enumerate(group.workers):
            after = nodes[(nodes.index(worker.node) + 1) % len(nodes)]
            for node in {worker.node, after}:
                new[node].append(
                    PeerSnapshot(peer_store=node, generation=group.generation, rank=rank, step=group.step)
                )
        for node, snapshots in new.items():
            kept = [s for s in self._held.get(node, ()) if s.generation == group.generation]
            kept = [s for s in kept if group.step - KEPT < s.step < group.step]
            self._held[node] = (*kept, *snapshots)

    def told(self, nodes: Collection[str]) -> tuple[PeerSnapshot, ...]:
        """What the stores of the nodes that live hold."""
        held = tuple(s for node in sorted(nodes) for s in self._held.get(node, ()))
        self.reported.update(held)
        return held
