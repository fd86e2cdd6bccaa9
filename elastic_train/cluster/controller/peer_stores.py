"""The peer stores of a run: one started on each node that has workers, paired over failure domains, asked."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from elastic_train.cluster.actor_names import NAMESPACE, peer_store_name
from elastic_train.cluster.controller.watch import accepts, domain_of, node_info
from elastic_train.cluster.messages import Reported
from elastic_train.cluster.peer_store.peer_store import CONCURRENCY, PeerStore
from elastic_train.cluster.ray_calls import answer, remote
from elastic_train.cluster.reported_events import each_once
from elastic_train.config import RunSpec
from elastic_train.control.peer_pairs import buddies

log = logging.getLogger(__name__)
CHECK_S = 5.0
STOP_S = 2.0


def _reachable(node: str) -> bool:
    """Whether a node's raylet accepts connections: Ray itself says of dead nodes for long that they live."""
    info = node_info(node)
    return info is not None and accepts(info["NodeManagerAddress"], info["NodeManagerPort"])


class PeerStores:
    """Safe from several threads. Does nothing where the run has no peer tier."""

    def __init__(
        self, *, run: str, term: int, spec: RunSpec, controller: Any, environment: Mapping[str, str]
    ) -> None:
        self._run, self._term, self._spec = run, term, spec
        self._controller, self._environment = controller, dict(environment)
        self._handles: dict[str, Any] = {}  # by node
        self._standby: frozenset[str] = frozenset()
        self._lock = threading.Lock()
        self._pairing = threading.Lock()
        self._stopped = False

    def adopt(self, node: str, handle: Any) -> None:
        """Take over a peer store that an earlier incarnation of the controller started."""
        with self._lock:
            self._handles[node] = handle

    def knows(self, node: str) -> bool:
        with self._lock:
            return node in self._handles

    def of(self, node: str) -> Any:
        """A node's peer store, or None."""
        with self._lock:
            return self._handles.get(node)

    def handles(self) -> dict[str, Any]:
        with self._lock:
            return dict(self._handles)

    def start(self, node: str) -> None:
        """Start a node's peer store if it has none. Returns at once."""
        if self._spec.checkpoints.peers is None:
            return
        with self._lock:
            info = node_info(node)
            if node in self._handles or info is None or self._stopped:
                return
            self._handles[node] = (
                remote(PeerStore, concurrency_groups=CONCURRENCY)
                .options(
                    name=peer_store_name(self._run, self._term, node),
                    namespace=NAMESPACE,
                    lifetime="detached",
                    num_cpus=0,
                    max_restarts=0,
                    scheduling_strategy=NodeAffinitySchedulingStrategy(info["NodeID"], soft=False),
                    runtime_env={"env_vars": self._environment},
                )
                .remote(run=self._run, node=node, spec=self._spec, controller=self._controller)
            )
        self.pair()

    def ensure(self, nodes: Collection[str]) -> None:
        """Every one of these nodes has a peer store that isn't dead."""
        asked = {node: handle.ready.remote() for node, handle in self.handles().items() if node in nodes}
        if asked:
            done, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=CHECK_S)
            for node, call in asked.items():
                if call in done:
                    self._answered(node, call)
        for node in nodes:
            self.start(node)
        self.pair()  # a node that was lost may have held the copies of one that wasn't

    def pair(self, standby: Collection[str] | None = None) -> None:
        """Tell every peer store that can be reached who may hold its copies. `standby`: nodes without a
        rank.
        """
        with self._pairing:
            if standby is not None:
                self._standby = frozenset(standby)
            handles = self.handles()
            infos = {node: node_info(node) for node in handles if _reachable(node)}
            domains = {node: domain_of(info) for node, info in infos.items() if info is not None}
            for node, chosen in buddies(domains, self._standby).items():
                handles[node].pair.remote([handles[buddy] for buddy in chosen])

    def reported(self, within_s: float) -> Reported:
        """What the peer stores that answer in time hold; those that are dead are forgotten."""
        asked = {
            node: handle.reported.remote() for node, handle in self.handles().items() if _reachable(node)
        }
        if not asked:
            return Reported()
        done, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=within_s)
        found: list[Reported] = []
        for node, call in asked.items():
            if call in done and (reported := self._answered(node, call)) is not None:
                found.append(reported)
        return Reported(
            snapshots=tuple(snapshot for reported in found for snapshot in reported.snapshots),
            steps=each_once(report for reported in found for report in reported.steps),
        )

    def stop(self) -> None:
        """End them all, and their segments with them. One that doesn't answer in a moment is killed: it may
        be starting still, and has nothing yet.
        """
        with self._lock:
            self._stopped = True
        calls = {handle.stop.remote(): handle for handle in self.handles().values()}
        if not calls:
            return
        _, silent = ray.wait(list(calls), num_returns=len(calls), timeout=STOP_S)
        for call in silent:
            with suppress(RayError):
                ray.kill(calls[call], no_restart=True)

    def _answered(self, node: str, call: Any) -> Any:
        try:
            return answer(call, CHECK_S)
        except GetTimeoutError:
            return None
        except RayError as error:
            log.warning("the peer store of %s is gone: %s", node, type(error).__name__)
            with self._lock:
                handle = self._handles.pop(node, None)
            if handle is not None:
                with suppress(RayError):
                    ray.kill(handle, no_restart=True)
            return None
