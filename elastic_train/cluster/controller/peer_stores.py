"""Start peer stores on nodes with workers, pair them across failure domains, and query them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from elastic_train.cluster.actor_names import NAMESPACE, peer_store_name
from elastic_train.cluster.controller.node_roster import Roster
from elastic_train.cluster.controller.run_context import RunContext
from elastic_train.cluster.messages import PeerReport
from elastic_train.cluster.nodes import domain_of
from elastic_train.cluster.peer_store.peer_store import CONCURRENCY, PeerStore
from elastic_train.cluster.peer_store.segments import sweep
from elastic_train.cluster.ray_calls import answer, remote
from elastic_train.cluster.reported_events import each_once
from elastic_train.control.peer_pairs import buddies

log = logging.getLogger(__name__)
CHECK_S = 5.0
HUNG_S = 30.0
"""A peer store that says nothing for so long is replaced. What it holds may be the newest, so there is no
haste.
"""
STOP_S, SWEEP_S = 1.0, 4.0


class PeerStores:
    """Safe from several threads. Does nothing where the run has no peer tier."""

    def __init__(
        self,
        context: RunContext,
        roster: Roster | None = None,
    ) -> None:
        self._context, self._spec = context, context.spec
        self._roster = roster if roster is not None else Roster()
        self._handles: dict[str, Any] = {}  # by node
        self._started: dict[str, float] = {}  # when, of those that never answered
        self._standby: frozenset[str] = frozenset()
        self._chosen: dict[str, tuple[Any, ...]] = {}  # what each was told, by node
        self._lock = threading.Lock()
        self._pairing = threading.Lock()
        self._stopped = False
        self._untidy: set[str] = set()  # nodes whose peer store had no time to let go of its memory

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
        """Start a node's peer store if it has none. Returns at once; `pair` tells it whose copies it may
        hold.
        """
        context = self._context
        info = self._roster.of(node) if self._spec.checkpoints.peers is not None else None
        with self._lock:
            if node in self._handles or info is None or self._stopped:
                return
            self._started[node] = time.monotonic()
            self._untidy.discard(node)  # a new one sweeps
            self._handles[node] = (
                remote(PeerStore, concurrency_groups=CONCURRENCY)
                .options(
                    name=peer_store_name(context.run, context.term, node),
                    namespace=NAMESPACE,
                    lifetime="detached",
                    num_cpus=0,
                    max_restarts=0,
                    scheduling_strategy=NodeAffinitySchedulingStrategy(info["NodeID"], soft=False),
                    runtime_env={"env_vars": dict(context.environment)},
                )
                .remote(run=context.run, node=node, spec=context.spec, controller=context.controller)
            )

    def ensure(self, nodes: Collection[str]) -> None:
        """Every one of these nodes has a peer store that isn't dead and doesn't hang."""
        for node in nodes:
            self.start(node)
        asked = {node: handle.ready.remote() for node, handle in self.handles().items() if node in nodes}
        if asked:
            done, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=HUNG_S)
            for node, call in asked.items():
                if call in done:
                    self._answered(node, call)
                elif self._up_since(node) > self._spec.timing.start_worker_s:
                    self._forget(node, f"no answer within {HUNG_S:.0f} s")
                self.start(node)
        self.pair()  # a node that was lost may have held the copies of one that wasn't

    def pair(self, standby: Collection[str] | None = None) -> None:
        """Tell every peer store that can be reached who may hold its copies, if that has changed. `standby`:
        nodes without a rank.
        """
        with self._pairing:
            if standby is not None:
                self._standby = frozenset(standby)
            handles = self.handles()
            reached = self._roster.reachable()
            domains = {node: domain_of(reached[node]) for node in handles if node in reached}
            for node, names in buddies(domains, self._standby).items():
                chosen = tuple(handles[buddy] for buddy in names)
                if self._chosen.get(node) != (handles[node], *chosen):
                    self._chosen[node] = (handles[node], *chosen)
                    handles[node].pair.remote(list(chosen))

    def reported(self, within_s: float) -> PeerReport:
        """What the peer stores that answer in time hold; those that are dead are forgotten."""
        reached = self._roster.reachable()
        asked = {node: handle.reported.remote() for node, handle in self.handles().items() if node in reached}
        if not asked:
            return PeerReport()
        done, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=within_s)
        found: list[PeerReport] = []
        for node, call in asked.items():
            if call in done and (reported := self._answered(node, call)) is not None:
                found.append(reported)
        return PeerReport(
            snapshots=tuple(snapshot for reported in found for snapshot in reported.snapshots),
            steps=each_once(report for reported in found for report in reported.steps),
        )

    def stop(self) -> None:
        """End them all, and their segments with them. One that doesn't answer in a moment may be starting
        still, and have nothing yet; what it left all the same is swept by a task on its node.
        """
        with self._lock:
            self._stopped = True
        handles = self.handles()
        calls = {handle.stop.remote(): node for node, handle in handles.items()}
        silent: list[Any] = []
        if calls:
            _, silent = ray.wait(list(calls), num_returns=len(calls), timeout=STOP_S)
        for handle in handles.values():
            with suppress(RayError):
                ray.kill(handle, no_restart=True)
        self._tidy({calls[call] for call in silent} | self._untidy)

    def _tidy(self, nodes: Collection[str]) -> None:
        reached = self._roster.reachable() if nodes else {}
        sweeps = [
            remote(sweep, num_cpus=0)
            .options(scheduling_strategy=NodeAffinitySchedulingStrategy(reached[node]["NodeID"], soft=False))
            .remote()
            for node in nodes
            if node in reached
        ]
        if sweeps:
            ray.wait(sweeps, num_returns=len(sweeps), timeout=SWEEP_S)

    def _answered(self, node: str, call: Any) -> Any:
        try:
            said = answer(call, CHECK_S)
        except GetTimeoutError:
            return None
        except RayError as error:
            self._forget(node, type(error).__name__)
            return None
        with self._lock:
            self._started.pop(node, None)
        return said

    def _up_since(self, node: str) -> float:
        """Seconds since a peer store was started that never answered; endless for one that did."""
        with self._lock:
            return time.monotonic() - self._started.get(node, float("-inf"))

    def _forget(self, node: str, why: str) -> None:
        log.warning("the peer store of %s is gone: %s", node, why)
        with self._lock:
            handle = self._handles.pop(node, None)
            self._untidy.add(node)
        if handle is not None:
            with suppress(RayError):
                ray.kill(handle, no_restart=True)
