"""Cache Ray's list of the cluster's nodes, so that many callers within a moment share one query."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence

import ray

from elastic_train.cluster.actor_names import short
from elastic_train.cluster.controller.probe_addresses import Verdict, reachable
from elastic_train.cluster.nodes import Info


class Roster:
    """Safe from any thread. `ask` lists all nodes, dead ones included."""

    def __init__(
        self,
        ask: Callable[[], Sequence[Info]] = ray.nodes,
        *,
        reach: Callable[[Mapping[str, tuple[str, int]]], Mapping[str, Verdict]] = reachable,
        max_age_s: float = 0.5,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask, self._reach, self._max_age_s, self._clock = ask, reach, max_age_s, clock
        self._lock = threading.Lock()
        self._listed = self._probed = float("-inf")  # when
        self._living: dict[str, Info] = {}
        self._known: dict[str, Info] = {}  # also those that are not alive any more
        self._said: Mapping[str, Verdict] = {}  # of those that were probed last

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
                self._said = self._reach({name: place_of(info) for name, info in living.items()})
                self._probed = self._clock()
            return {name: info for name, info in living.items() if self._said.get(name) == "accepts"}

    def accept_now(self, nodes: Collection[str]) -> frozenset[str]:
        """Those of these nodes that accept connections at this moment."""
        living = self.living()
        found = self._reach({name: place_of(living[name]) for name in nodes if name in living})
        return frozenset(name for name, said in found.items() if said == "accepts")

    def answers(self, nodes: Collection[str]) -> Mapping[str, Verdict]:
        """What these nodes themselves answered last, those that Ray doesn't list any more included."""
        said = self._said
        unheard = {
            name: place_of(self._known[name]) for name in nodes if name in self._known.keys() - said.keys()
        }
        return {**{name: said[name] for name in nodes if name in said}, **self._reach(unheard)}

    def _list(self) -> dict[str, Info]:
        if self._clock() - self._listed > self._max_age_s:
            self._living = {short(info["NodeID"]): info for info in self._ask() if info["Alive"]}
            self._known |= self._living
            self._listed = self._clock()
        return self._living


def place_of(info: Info) -> tuple[str, int]:
    """Where a node's raylet listens."""
    return str(info["NodeManagerAddress"]), int(info["NodeManagerPort"])
