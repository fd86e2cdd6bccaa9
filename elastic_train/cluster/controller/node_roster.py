"""Ray's list of the cluster's nodes: one look for all who ask within a moment, however many they are."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import ray

from elastic_train.cluster.actor_names import short
from elastic_train.cluster.controller.reachable import reachable

Info = Mapping[str, Any]
"""A node in Ray's words."""


class Roster:
    """Safe from any thread. `ask` lists all nodes, dead ones included."""

    def __init__(
        self,
        ask: Callable[[], Sequence[Info]] = ray.nodes,
        *,
        reach: Callable[[Mapping[str, tuple[str, int]]], frozenset[str]] = reachable,
        max_age_s: float = 0.5,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask, self._reach, self._max_age_s, self._clock = ask, reach, max_age_s, clock
        self._lock = threading.Lock()
        self._listed = self._probed = float("-inf")  # when
        self._living: dict[str, Info] = {}
        self._reached: frozenset[str] = frozenset()

    def living(self) -> Mapping[str, Info]:
        """The nodes that Ray calls alive, by their names in a run."""
        with self._lock:
            return self._list()

    def of(self, node: str) -> Info | None:
        return self.living().get(node)

    def reachable(self) -> dict[str, Info]:
        """Those that are alive and whose raylets accept connections: Ray itself says of dead nodes for long
        that they live.
        """
        with self._lock:  # whoever comes meanwhile gets the same answer
            living = self._list()
            if self._clock() - self._probed > self._max_age_s:
                self._reached = self._reach({name: place_of(info) for name, info in living.items()})
                self._probed = self._clock()
            return {name: info for name, info in living.items() if name in self._reached}

    def accept_now(self, nodes: Collection[str]) -> frozenset[str]:
        """Those of these nodes that accept connections at this moment."""
        living = self.living()
        return self._reach({name: place_of(living[name]) for name in nodes if name in living})

    def _list(self) -> dict[str, Info]:
        if self._clock() - self._listed > self._max_age_s:
            self._living = {short(info["NodeID"]): info for info in self._ask() if info["Alive"]}
            self._listed = self._clock()
        return self._living


def place_of(info: Info) -> tuple[str, int]:
    """Where a node's raylet listens."""
    return str(info["NodeManagerAddress"]), int(info["NodeManagerPort"])
