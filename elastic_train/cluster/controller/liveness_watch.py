"""Watch nodes by polling, and workers by a pending call, by heartbeats, and by a probe of their raylet.

Every sign becomes an event; nothing is concluded here beyond "this process is gone" and "this node is there".
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError

from elastic_train.cluster import ray_private
from elastic_train.cluster.actor_names import short
from elastic_train.cluster.controller.autoscaler_demand import slots_of
from elastic_train.cluster.controller.node_roster import Roster
from elastic_train.cluster.error_causes import death_of
from elastic_train.cluster.messages import Heartbeat, Ready, Writing
from elastic_train.cluster.nodes import domain_of
from elastic_train.config import RunSpec, Timing
from elastic_train.control.events import Cause, Event, Node, NodesChanged, WorkerLost

log = logging.getLogger(__name__)
POLL_S = 0.25
PROBE_S = 1.0
SILENT_HEARTBEATS = 3.0
"""Heartbeats that may be missing before what a worker said last is taken to last on."""

MISSED_HEARTBEATS = 1.25
"""Heartbeats whose absence confirms that a node is gone which answers no connection."""
SAME_S = 1.0  # clocks differ by less than what makes a deadline another one


class NodeWatch:
    """Looks at the cluster's nodes and posts NodesChanged when they change.

    Ray takes from seconds to a minute to call a silent node dead, and places actors there until then. So a
    node counts only while its raylet accepts connections. But a list of nodes, and a connection that comes to
    nothing, are the word of one observer: what failed may be its own way to them. A node that is missing is
    asked itself. One that accepts is there, one that refuses is gone. One that says nothing goes when its
    workers are silent too, and where no node of any worker is found, that is waited for as long as for final
    reports: it is more likely that this process is cut off.
    """

    def __init__(
        self,
        spec: RunSpec,
        roster: Roster,
        post: Callable[[Event], None],
        now: Callable[[], float],
        heard: Callable[[], Mapping[str, float]],
    ) -> None:
        """`heard`: when each node's workers were heard of last, by node, on the clock `now`."""
        self._spec, self._roster, self._post, self._now, self._heard = spec, roster, post, now, heard
        self._seen: dict[str, Node] | None = None
        self._missing: set[str] = set()  # when they were looked for last
        self._deadlines = Deadlines()

    def poll(self) -> None:
        draining = {short(node): left for node, left in ray_private.draining_nodes().items()}
        self.look(draining)

    def look(self, draining: Mapping[str, float]) -> None:
        """`draining`: seconds that are left, by node."""
        found: dict[str, Node] = {}
        for name, info in self._roster.reachable().items():
            slots = slots_of(self._spec, info["Resources"], info.get("Labels", {}))
            if not slots:
                continue
            if name in draining:
                self._deadlines.hear(name, self._now() + draining[name])
            found[name] = Node(
                name=name, slots=slots, domain=domain_of(info), drain_by=self._deadlines.of(name)
            )
        found |= self._doubtful(found)
        if found != self._seen:
            self._seen = found
            nodes = tuple(sorted(found.values(), key=lambda n: n.name))
            self._post(NodesChanged(at=0.0, nodes=nodes))

    def _doubtful(self, found: Mapping[str, Node]) -> dict[str, Node]:
        """Nodes that are missing now and not yet believed to be gone."""
        seen, heard, now = self._seen or {}, self._heard(), self._now()
        gone = {name for name in seen if name not in found}
        said = self._roster.answers(gone) if gone else {}
        limit = patience_s(self._spec.timing, cut_off=bool(heard) and not heard.keys() & found.keys())
        kept: dict[str, Node] = {}
        for name in gone:
            if said.get(name, "silent") == "silent":
                doubtful = now - heard[name] < limit if name in heard else name not in self._missing
            else:
                doubtful = said[name] == "accepts"
            if doubtful:
                kept[name] = seen[name]
        self._missing = gone
        return kept


def patience_s(timing: Timing, *, cut_off: bool) -> float:
    """Seconds of silence that confirm what one look says; `cut_off`: it may be this process that sees
    nobody.
    """
    return timing.settle_s if cut_off else MISSED_HEARTBEATS * timing.heartbeat_s


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
    host. Silence alone is a suspicion: `verdict` is told who is silent, and has them looked at.
    """

    def __init__(self, spec: RunSpec, post: Callable[[Event], None], now: Callable[[], float]) -> None:
        self._spec, self._post, self._now = spec, post, now
        self._lock = threading.Lock()
        self._lives: dict[ray.ObjectRef, tuple[str, Any]] = {}  # name and handle
        self._doubted: dict[str, Cause] = {}  # whom Ray could not reach, which may be its own way there
        self._heard: dict[str, float] = {}
        self._asked: dict[str, float] = {}  # when a silent worker was last looked at
        self._places: dict[str, tuple[str, int]] = {}  # node and process id
        self._heartbeats: dict[str, Heartbeat] = {}
        self._writing: dict[str, tuple[int, float]] = {}  # whose bytes storage took last, when, by writer
        self._gone: set[str] = set()

    def add(self, worker: str, handle: Any) -> None:
        with self._lock:
            self._lives[handle.life.remote()] = (worker, handle)
            self._heard[worker] = self._now() + self._spec.timing.start_worker_s

    def met(self, ready: Ready) -> None:
        """Know where a worker's process is, for those who look at it."""
        with self._lock:
            self._places[ready.worker] = (ready.node, ready.pid)

    def heard(self, worker: str, heartbeat: Heartbeat) -> bool:
        """Note a heartbeat; False if this worker was given up before."""
        with self._lock:
            if worker in self._gone:
                return False
            self._heard[worker] = self._now()
            self._places[worker] = (heartbeat.node, heartbeat.pid)
            self._asked.pop(worker, None)
            self._heartbeats[worker] = heartbeat
        self.wrote(worker, heartbeat.writing)
        return True

    def wrote(self, writer: str, writing: Writing | None) -> None:
        """Note what a worker or a node's peer store says of its writing."""
        with self._lock:
            self._writing.pop(writer, None)
            if writing is not None and writer not in self._gone:
                self._writing[writer] = (writing.generation, self._now() - writing.seconds)

    def written_s(self, generation: int) -> float | None:
        """For how long storage took no bytes of a generation; None where nobody writes any."""
        with self._lock:
            last = max((at for of, at in self._writing.values() if of == generation), default=None)
        return None if last is None else self._now() - last

    def in_user_code(self, workers: frozenset[str]) -> bool:
        """Whether one of them said last that it is inside the job's own code."""
        return any(s.worker in workers and s.user_code for s in self.heartbeats())

    def heartbeats(self) -> tuple[Heartbeat, ...]:
        """What workers said last. The phase of one that says nothing lasts on."""
        with self._lock:
            old = SILENT_HEARTBEATS * self._spec.timing.heartbeat_s
            ages = {worker: self._now() - self._heard[worker] for worker in self._heartbeats}
            return tuple(
                replace(s, phase_s=s.phase_s + ages[worker]) if ages[worker] > old else s
                for worker, s in self._heartbeats.items()
            )

    def nodes_heard(self) -> dict[str, float]:
        """When the workers of each node were heard of last."""
        with self._lock:
            heard: dict[str, float] = {}
            for worker, (node, _) in self._places.items():
                if worker in self._heartbeats:
                    heard[node] = max(heard.get(node, 0.0), self._heard[worker])
            return heard

    def doubt(self, worker: str, cause: Cause) -> None:
        """Have a worker looked at now; `cause` is that of its end if its process doesn't live."""
        with self._lock:
            if worker not in self._gone:
                self._doubted[worker] = cause

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
        for known in (self._heard, self._asked, self._doubted, self._places, self._heartbeats, self._writing):
            known.pop(worker, None)

    def suspects(self) -> dict[str, tuple[str, int]]:
        """Workers whose silence has become long since they were last looked at, and those that are in doubt;
        with node and process id.
        """
        limit = self._spec.timing.liveness_s
        with self._lock:
            now = self._now()
            silent = {w for w, at in self._heard.items() if now - max(at, self._asked.get(w, at)) > limit}
            self._asked |= dict.fromkeys(silent, now)
            return {
                worker: self._places.get(worker, ("", 0)) for worker in sorted(silent | set(self._doubted))
            }

    def within_patience(self, suspects: Collection[str]) -> set[str]:
        """Those that were heard of so lately that this process may be cut off from all of them."""
        limit = patience_s(self._spec.timing, cut_off=True)
        with self._lock:
            return {w for w in suspects if self._now() - self._heard.get(w, float("-inf")) <= limit}

    def judge(self, suspects: Collection[str], living: Collection[str]) -> None:
        """Of those that were silent, who is not known to live is lost; nobody lives in silence for ever."""
        with self._lock:
            silence = {w: self._now() - self._heard[w] for w in suspects if w in self._heard}
            doubted = {w: self._doubted.pop(w) for w in suspects if w in self._doubted}
        for worker, cause in doubted.items():
            if worker not in living:
                self.lost(worker, cause)
        for worker, seconds in silence.items():
            if seconds <= self._spec.timing.liveness_s:  # it spoke meanwhile
                continue
            if worker in living and seconds <= self._spec.timing.progress_s:
                log.warning("%s has said nothing for %.0f s, and its process lives", worker, seconds)
                continue
            self.lost(worker, Cause(kind="silence", detail=f"no heartbeat of {worker} for {seconds:.1f} s"))

    def look_for_deaths(self) -> None:
        """Wait a moment for the end of any worker."""
        with self._lock:
            refs = list(self._lives)
        if not refs:
            return
        ended, _ = ray.wait(refs, num_returns=1, timeout=POLL_S, fetch_local=False)
        for ref in ended:
            with self._lock:
                worker, handle = self._lives.pop(ref)
                last = self._heartbeats.get(worker)
            error = _error_of(ref)
            cause = death_of(worker, error, last)
            if isinstance(error, ActorUnavailableError):
                with self._lock:
                    if worker not in self._gone:
                        self._lives[handle.life.remote()] = (worker, handle)
                self.doubt(worker, cause)
            else:
                self.lost(worker, cause)


def _error_of(ref: ray.ObjectRef) -> RayError | None:
    try:
        ray.get(ref, timeout=PROBE_S)
    except RayError as error:
        return error
    return None


def at(event: Event, now: float) -> Event:
    """The event stamped with the controller's clock."""
    return replace(event, at=now)
