"""The peer store actor, one per node: keeps snapshots that outlive workers, and writes them to storage.

A worker copies into a segment of its node's peer store. The copy on another node came on a socket that the
peer store there asked for; it is an object of Ray's store there, which that peer store owns and keeps a view
of.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from elastic_train.cluster.byte_stream import Arrivals, Door, arrived, bring
from elastic_train.cluster.checkpoint_io import PartWriter, read_in_turn
from elastic_train.cluster.messages import Offer, PeerReport, SealedSnapshot
from elastic_train.cluster.nodes import node_info, spilled_bytes
from elastic_train.cluster.outbox import ORPHAN_LEASES, Outbox
from elastic_train.cluster.peer_store import segments
from elastic_train.cluster.peer_store.peer_figures import PeerFigures, SnapshotSizes
from elastic_train.cluster.peer_store.segments import Segment
from elastic_train.cluster.peer_store.snapshot_store import SnapshotStore
from elastic_train.cluster.process_witness import Sighting, sight
from elastic_train.cluster.ray_calls import answer
from elastic_train.config import RunSpec
from elastic_train.errors import ElasticTrainError, GroupBroken
from elastic_train.geometry.fragments import Fragments
from elastic_train.recovery.evidence import Live

log = logging.getLogger(__name__)
CONTROL, SEAL, READ, FLUSH = "control", "seal", "read", "flush"
CONCURRENCY = {CONTROL: 4, SEAL: 8, READ: 8, FLUSH: 4}
COPY_S = 60.0
"""How long a copy on another node may take before the snapshot counts as complete without it."""


class PeerStore:
    """`run` is the run's key; `controller` the actor that is told what was written."""

    def __init__(self, *, run: str, node: str, spec: RunSpec, controller: Any) -> None:
        self._run, self._node = run, node
        for name in segments.sweep():
            log.info("removed %s, which a dead peer store left", name)
        segments.remove_in_the_end(self._segment_name(""))
        self._segments: dict[tuple[str, int], Segment] = {}  # by worker and generation
        self._flushing: set[tuple[str, int]] = set()
        self._lock = threading.Lock()
        self._making = threading.Lock()  # one segment at a time: each takes of what the others leave
        self._bound = spec.checkpoints.peer_bytes
        self._repeated = (0, 0)  # generation and step
        self._snapshot_store = SnapshotStore(node)
        self._buddies: Sequence[Any] = ()
        info = node_info(node)
        self._store_bytes = int(info["Resources"]["object_store_memory"]) if info is not None else sys.maxsize
        self._writer = PartWriter(spec, lambda word: self._outbox.post(word), clock=time.monotonic)
        self._outbox = Outbox(
            lambda words, writing: controller.deliver_kept.remote(node, words, writing),
            self._writer.writing,
            heartbeat_s=spec.timing.heartbeat_s,
            grace_s=spec.timing.lease_s * ORPHAN_LEASES,
            expired=self._exit,
        )
        self._figures = PeerFigures(node, self._sizes, self._outbox.post, clock=time.monotonic)

    @ray.method(concurrency_group=CONTROL)
    def ready(self) -> int:
        return os.getpid()

    @ray.method(concurrency_group=CONTROL)
    def sight(self, pid: int) -> Sighting:
        """Whether another process of this machine lives, which says nothing itself."""
        return sight(pid)

    @ray.method(concurrency_group=CONTROL)
    def pair(self, buddies: Sequence[Any]) -> None:
        """The peer stores on other nodes that are asked to hold copies of what this one holds, until one
        does.
        """
        self._buddies = buddies

    @ray.method(concurrency_group=CONTROL)
    def stop(self) -> None:
        """Let go of what this process holds outside of itself. Whoever asks then ends it through Ray, which
        takes a process that ends itself for one that crashed, and says so to people.
        """
        self._drop_all()

    # -- from the workers of this node

    @ray.method(concurrency_group=CONTROL)
    def reserve(self, worker: str, generation: int, size: int, slots: int, present: str = "") -> str:
        """Shared memory for a worker's snapshots in a generation; its path. MemoryTooSmall where there is
        less, or less is allowed.

        `present` is the path of what the worker has of an older generation, and goes on with where it is
        still here: what it holds stays until newer snapshots are complete.
        """
        name = self._segment_name(f"{worker}-{generation}-{os.getpid()}")
        with self._lock:
            theirs = [one for (of, _), one in self._segments.items() if of == worker]
            kept = next((one for one in theirs if str(one.path) == present), None)
            outgrown = self._segments.pop((worker, generation), None)
            if kept is not None:
                self._segments[worker, generation] = kept
            if outgrown in self._segments.values():
                outgrown = None
        if outgrown is not None:
            outgrown.drop()
        held = self._snapshot_store.generations() | {generation}
        self._drop_segments(lambda key: key[0] == worker and key[1] not in held)
        if kept is not None:
            return str(kept.path)
        with self._making:
            taken = self._own_bytes() + self._snapshot_store.copied_bytes()
            segments.check_allowed(slots * size, taken=taken, bound=self._bound, what=f"{slots} snapshots")
            segment = segments.create(name, size, slots=slots)
            with self._lock:
                self._segments[worker, generation] = segment
        return str(segment.path)

    @ray.method(concurrency_group=SEAL)
    def seal(self, sealed: SealedSnapshot) -> None:
        """A snapshot is whole: it can be read and written from here, whatever becomes of its worker."""
        generation = sealed.snapshot.generation
        with self._lock:
            segment = self._segments.get((sealed.worker, generation))
        if segment is None:  # its worker is in another generation by now
            return
        snapshot = sealed.snapshot.attached(segment.arena)
        self._snapshot_store.put(snapshot, first=sealed.first, steps=sealed.steps)
        self._drop_segments(
            lambda key: key[1] not in self._snapshot_store.generations() and key[1] < generation
        )
        self._figures.sealed(sealed)

    @ray.method(concurrency_group=SEAL)
    def copy(self, sealed: SealedSnapshot, me: Any) -> str:
        """Returns once a copy of what was sealed is on another node; why there is none where there isn't."""
        why_not = "there is no other node"
        for buddy in self._buddies:
            try:
                answer(buddy.hold.remote(sealed, me), COPY_S)
            except (RayError, GetTimeoutError) as error:
                cause = error.cause if isinstance(error, RayTaskError) else None
                why_not = str(cause) if isinstance(cause, ElasticTrainError) else type(error).__name__
            else:
                return ""
        return why_not

    @ray.method(concurrency_group=FLUSH)
    def flush(self, sealed: SealedSnapshot) -> None:
        """Write a snapshot that was sealed here to storage and say so; the worker may die meanwhile."""
        there = sealed.snapshot
        key = (sealed.worker, there.generation)
        with self._lock:
            self._flushing.add(key)
        try:
            snapshot = self._snapshot_store.snapshot(there.generation, there.rank, there.step)
            if there.rank == 0:
                self._repeat()
            self._writer.save(snapshot)
        finally:
            with self._lock:
                self._flushing.discard(key)

    # -- from other peer stores

    @ray.method(concurrency_group=READ)
    def hold(self, sealed: SealedSnapshot, other: Any) -> None:
        """Keep a copy of what another node's peer store has. Asked for from here, so that it is owned here.

        Raises MemoryTooSmall.
        """
        there = sealed.snapshot
        free = self._store_bytes
        if self._bound is not None:
            free = min(free, max(self._bound - self._own_bytes(), 0))
        self._snapshot_store.make_room(there, free)
        came = np.empty(there.buffer.nbytes, np.uint8)
        until = time.monotonic() + COPY_S

        def in_time() -> None:
            if time.monotonic() > until:
                raise GetTimeoutError(f"a copy of step {there.step} did not come in {COPY_S:.0f} s")

        with Arrivals(ray.util.get_node_ip_address()) as arrivals:
            door = arrivals.door()
            call = other.give.remote(there.generation, there.rank, there.step, door)
            memory = {door.ticket: iter([came.data])}
            arrived(arrivals, {door.ticket: call}, memory, in_time, generation=there.generation)
        answer(call, COPY_S)  # nothing was overwritten meanwhile
        data = answer(ray.put(came), COPY_S)
        self._snapshot_store.put(there.copied(data), first=sealed.first, steps=sealed.steps)

    @ray.method(concurrency_group=READ)
    def give(self, generation: int, rank: int, step: int, door: Door) -> None:
        """Bring a snapshot to who asked for it."""
        snapshot = self._snapshot_store.snapshot(generation, rank, step)
        bring([snapshot.buffer.data], door, generation=generation)
        if not snapshot.buffer.sound:
            raise GroupBroken(generation=generation, reason=f"a snapshot of step {step} was overwritten")

    # -- for whoever recovers: the same questions that a worker answers

    @ray.method(concurrency_group=CONTROL)
    def reported(self) -> PeerReport:
        return PeerReport(snapshots=self._snapshot_store.evidence(), steps=self._snapshot_store.steps())

    @ray.method(concurrency_group=CONTROL)
    def offer(self, origin: Live) -> Offer:
        return self._snapshot_store.offer(origin.generation, origin.step)

    @ray.method(concurrency_group=READ)
    def read(self, generation: int, step: int, wanted: Fragments) -> list[np.ndarray]:
        return self._snapshot_store.read(generation, step, wanted)

    @ray.method(concurrency_group=READ)
    def bring(self, generation: int, step: int, wanted: Fragments, door: Door) -> None:
        bring(read_in_turn(self._snapshot_store.read, generation, step, wanted), door, generation=generation)

    @ray.method(concurrency_group=READ)
    def digest_of(self, generation: int, step: int, boxes: Fragments) -> int:
        return self._snapshot_store.digest_of(generation, step, boxes)

    # -- private

    def _repeat(self) -> None:
        """Tell the steps since the last checkpoint: none may be committed of a step that nobody heard of."""
        with self._lock:
            news = [r for r in self._snapshot_store.steps() if (r.generation, r.step) > self._repeated]
            if news:
                self._repeated = news[-1].generation, news[-1].step
        self._outbox.post(*news)

    def _sizes(self) -> SnapshotSizes:
        return SnapshotSizes(
            own=self._own_bytes(),
            copies=self._snapshot_store.copied_bytes(),
            room=self._store_bytes,
            spilled=spilled_bytes(self._node),
        )

    def _own_bytes(self) -> int:
        """Of the segments."""
        with self._lock:
            return sum(segment.size for segment in set(self._segments.values()))

    def _drop_segments(self, due: Callable[[tuple[str, int]], bool]) -> None:
        with self._lock:
            gone = [key for key in self._segments if due(key) and key not in self._flushing]
            popped = {self._segments.pop(key) for key in gone}
            dropped = popped - set(self._segments.values())
        for segment in dropped:
            segment.drop()

    def _segment_name(self, rest: str) -> str:
        return f"{self._run}-{self._node}-{rest}".replace("/", "_")

    def _drop_all(self) -> None:
        """This process ends: names go, those of segments that are being written from, too."""
        with self._lock:
            dropped, self._segments = set(self._segments.values()), {}
        for segment in dropped:
            segment.drop()

    def _exit(self, why: str) -> None:
        self._drop_all()
        os.write(2, f"peer store of {self._node} ends itself: {why}\n".encode())
        os._exit(1)
