"""Watching: nodes by polling, workers by a pending call, by their heartbeats, and by a probe of their raylet.

Every sign becomes an event; nothing is concluded here beyond "this process is gone" and "this node is there".
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError

from elastic_train.cluster import ray_private
from elastic_train.cluster.controller.autoscaler_demand import slots_of
from elastic_train.cluster.error_causes import death_of
from elastic_train.cluster.messages import Heartbeat
from elastic_train.config import RunSpec
from elastic_train.control.events import Cause, Event, Node, NodesChanged, WorkerLost

POLL_S = 0.25
PROBE_S = 1.0
SAME_S = 1.0  # clocks differ by less than what makes a deadline another one
DOMAIN_LABELS = ("ray.io/availability-zone", "rack")


class NodeWatch:
    """Polls the cluster's nodes and posts NodesChanged when they change.

    Ray takes from seconds to a minute to call a silent node dead, and places actors there until then. So a
    node counts only while its raylet accepts connections.
    """

    def __init__(self, spec: RunSpec, post: Callable[[Event], None], now: Callable[[], float]) -> None:
        self._spec, self._post, self._now = spec, post, now
        self._seen: tuple[Node, ...] | None = None
        self._deadlines = Deadlines()
        # Side by side: each cut-off host takes the whole of a probe's time.
        self._probes = ThreadPoolExecutor(max_workers=32, thread_name_prefix="probe")

    def poll(self) -> None:
        draining = {short(node): left for node, left in ray_private.draining_nodes().items()}
        nodes: list[Node] = []
        alive = [info for info in ray.nodes() if info["Alive"]]
        there = self._probes.map(lambda n: accepts(n["NodeManagerAddress"], n["NodeManagerPort"]), alive)
        for info, accepted in zip(alive, there, strict=True):
            node = short(info["NodeID"])
            if not accepted:
                continue
            slots = slots_of(self._spec, info["Resources"], info.get("Labels", {}))
            if not slots:
                continue
            if node in draining:
                self._deadlines.hear(node, self._now() + draining[node])
            nodes.append(
                Node(name=node, slots=slots, domain=domain_of(info), drain_by=self._deadlines.of(node))
            )
        found = tuple(sorted(nodes, key=lambda n: n.name))
        if found != self._seen:
            self._seen = found
            self._post(NodesChanged(at=0.0, nodes=found))


class Deadlines:
    """By when each node has to be left: the earliest word counts, on the controller's clock.

    A machine may be told twice, as by its cloud and then by SIGTERM; Ray knows the final report, or none
    after its head was restarted.
    """

    def __init__(self) -> None:
        self._by: dict[str, float] = {}

    def hear(self, node: str, by: float) -> None:
        if by < self._by.get(node, float("inf")) - SAME_S:
            self._by[node] = by

    def of(self, node: str) -> float | None:
        return self._by.get(node)


class WorkerWatch:
    """Knows each worker's handle and notices its end.

    `life` is a call that stays pending while the process lives: it fails within milliseconds when the process
    dies and within two seconds when its node does. Heartbeats cover what never fails: a stopped or cut-off
    host.
    """

    def __init__(self, spec: RunSpec, post: Callable[[Event], None], now: Callable[[], float]) -> None:
        self._spec, self._post, self._now = spec, post, now
        self._lock = threading.Lock()
        self._lives: dict[ray.ObjectRef, str] = {}
        self._heard: dict[str, float] = {}
        self.heartbeats: dict[str, Heartbeat] = {}
        self._gone: set[str] = set()
        threading.Thread(target=self._wait_for_deaths, name="deaths", daemon=True).start()

    def add(self, worker: str, handle: Any) -> None:
        with self._lock:
            self._lives[handle.life.remote()] = worker
            self._heard[worker] = self._now() + self._spec.timing.start_worker_s

    def heard(self, worker: str, heartbeat: Heartbeat) -> bool:
        """Note a heartbeat; False if this worker was given up before."""
        with self._lock:
            if worker in self._gone:
                return False
            self._heard[worker] = self._now()
            self.heartbeats[worker] = heartbeat
            return True

    def forgive(self) -> None:
        """Our own clock stood still: nobody's silence counts from before."""
        with self._lock:
            now = self._now()
            self._heard = {worker: max(at, now) for worker, at in self._heard.items()}

    def lost(self, worker: str, cause: Cause) -> None:
        """Post the end of a worker once, whoever noticed it."""
        with self._lock:
            if worker in self._gone:
                return
            self._forget(worker)
        self._post(WorkerLost(at=0.0, worker=worker, cause=cause))

    def expect_end(self, worker: str) -> None:
        """This worker is being stopped: its end is no event."""
        with self._lock:
            self._forget(worker)

    def _forget(self, worker: str) -> None:
        self._gone.add(worker)
        self._heard.pop(worker, None)
        self.heartbeats.pop(worker, None)

    def check_silence(self) -> None:
        limit = self._spec.timing.liveness_s
        with self._lock:
            silent = {w: self._now() - at for w, at in self._heard.items() if self._now() - at > limit}
        for worker, silence in silent.items():
            self.lost(worker, Cause(kind="silence", detail=f"no heartbeat of {worker} for {silence:.1f} s"))

    def _wait_for_deaths(self) -> None:
        while True:
            with self._lock:
                refs = list(self._lives)
            if not refs:
                threading.Event().wait(POLL_S)
                continue
            ended, _ = ray.wait(refs, num_returns=1, timeout=POLL_S, fetch_local=False)
            for ref in ended:
                with self._lock:
                    worker = self._lives.pop(ref)
                self.lost(worker, death_of(worker, _error_of(ref), self.heartbeats.get(worker)))


def _error_of(ref: ray.ObjectRef) -> RayError | None:
    try:
        ray.get(ref, timeout=PROBE_S)
    except RayError as error:
        return error
    return None


def accepts(address: str, port: int) -> bool:
    """Whether something listens there: a dead process refuses at once, a cut-off host doesn't answer.

    Two tries: the kernel repeats a lost packet only after a second.
    """
    for _ in range(2):
        try:
            socket.create_connection((address, port), timeout=PROBE_S / 2).close()
        except TimeoutError:
            continue
        except OSError:
            return False
        return True
    return False


def domain_of(info: Mapping[str, Any]) -> str:
    """A node's failure domain by its labels; itself where it has none."""
    labels: Mapping[str, str] = info.get("Labels", {})
    return next((labels[key] for key in DOMAIN_LABELS if key in labels), short(info["NodeID"]))


def short(node: str) -> str:
    """A node's name in a run: the beginning of its Ray id, enough to tell nodes apart and to be read."""
    return node[:8]


def node_info(name: str) -> Mapping[str, Any] | None:
    """What Ray knows of a living node."""
    return next((n for n in ray.nodes() if n["Alive"] and short(n["NodeID"]) == name), None)


def spilled_bytes(name: str) -> int:
    """What Ray moved from a node's object store to its disk so far."""
    info = node_info(name)
    if info is None:
        return 0
    return ray_private.spilled(info["NodeManagerAddress"], info["NodeManagerPort"])


def at(event: Event, now: float) -> Event:
    """The event stamped with the controller's clock."""
    return replace(event, at=now)
