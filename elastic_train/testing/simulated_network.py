"""The simulated network: any nodes may be cut off from the controller, from each other, or from storage.

Between a node and the controller each direction is cut by itself: words wait on their node and come later,
orders are lost. A node that no order reaches and no word comes from is given up as on a cluster, where its
silence has a second sign; of one that only says nothing its machine knows better.
"""

from __future__ import annotations

from collections.abc import Collection

from elastic_train.testing.simulated_time import Clock


class SimulatedNetwork:
    """Until when each node is cut off, by way."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.touched: set[str] = set()  # nodes that ever were cut off
        self._words: dict[str, float] = {}
        self._orders: dict[str, float] = {}
        self._peers: dict[str, float] = {}
        self._storage: dict[str, float] = {}

    def cut(
        self,
        nodes: Collection[str],
        seconds: float,
        *,
        words: bool = False,
        orders: bool = False,
        peers: bool = False,
        storage: bool = False,
    ) -> None:
        self.touched.update(nodes)
        ways = ((self._words, words), (self._orders, orders), (self._peers, peers), (self._storage, storage))
        for way, chosen in ways:
            if chosen:
                way.update(dict.fromkeys(nodes, self._clock.now + seconds))

    def words_wait_s(self, node: str) -> float:
        """For how much longer the words of a node do not reach the controller."""
        return self._left(self._words, node)

    def hears(self, node: str) -> bool:
        """Whether orders reach a node."""
        return not self._left(self._orders, node)

    def is_dark(self, node: str) -> bool:
        """Whether the controller knows nothing of a node, by any way."""
        return bool(self.words_wait_s(node)) and not self.hears(node)

    def peers_wait_s(self, nodes: Collection[str]) -> float:
        """For how much longer some of these nodes cannot reach the others."""
        return max((self._left(self._peers, node) for node in nodes), default=0.0) if len(nodes) > 1 else 0.0

    def stores(self, node: str) -> bool:
        return not self._left(self._storage, node)

    def _left(self, way: dict[str, float], node: str) -> float:
        return max(way.get(node, 0.0) - self._clock.now, 0.0)
