"""The snapshots of one peer store: those of its node's workers, and copies of another node's.

A snapshot for peer memory begins only after the vote said that the one before it is complete on every rank,
so of two the older is complete wherever the newer isn't yet. A checkpoint's does not wait: a third one stays.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np

from elastic_train.checkpoint.engine.arena import SPARE, require
from elastic_train.checkpoint.merging import merged
from elastic_train.checkpoint.snapshot import Snapshot
from elastic_train.cluster.messages import Offer
from elastic_train.cluster.reported_events import each_once
from elastic_train.control.events import StepCommitted
from elastic_train.errors import GroupBroken
from elastic_train.geometry.box import Box
from elastic_train.geometry.digest import MASK, of_boxes
from elastic_train.geometry.fragments import ITEM_BYTES, Fragments
from elastic_train.recovery.evidence import PeerSnapshot

STEPS = 3
REPORTS = 1024
"""Steps that a controller may lose with its process."""


class SnapshotStore:
    """Safe from several threads. `peer_store` is the name that evidence knows it by."""

    def __init__(self, peer_store: str) -> None:
        self._peer_store = peer_store
        self._snapshots: dict[tuple[int, int, int], Snapshot] = {}  # by generation, rank, step
        self._reports: deque[StepCommitted] = deque(maxlen=REPORTS)
        self._lock = threading.Lock()

    def put(self, snapshot: Snapshot, *, first: bool = False, steps: Sequence[StepCommitted] = ()) -> None:
        """Keep a snapshot; an older one of its rank goes, and with a second one older generations. It is the
        `first` of its generation, or not; `steps` came with it.
        """
        generation, rank = snapshot.generation, snapshot.rank
        with self._lock:
            self._snapshots[generation, rank, snapshot.step] = snapshot
            self._reports += steps
            known = sorted(s for g, r, s in self._snapshots if (g, r) == (generation, rank))
            for step in known[:-STEPS]:
                del self._snapshots[generation, rank, step]
            if not first:
                self._snapshots = {key: s for key, s in self._snapshots.items() if key[0] >= generation}

    def make_room(self, snapshot: Snapshot, free: int) -> None:
        """Before a copy comes into an object store of `free` bytes: MemoryTooSmall where it would not fit.

        Copies that are held are never spilled, so a store that is full would keep everybody waiting. An older
        step of the same rank goes for it, as long as one stays. Bytes come on a socket into memory of the
        peer store, so that they are in the object store once.
        """
        needed = snapshot.buffer.nbytes
        with self._lock:
            copies = sorted((s for s in self._snapshots.values() if _is_copy(s)), key=lambda s: s.step)
            held = sum(copy.buffer.nbytes for copy in copies)
            older = [copy for copy in copies if copy.rank == snapshot.rank][:-1]
            while older and held + needed > free * (1 - SPARE):
                gone = older.pop(0)
                del self._snapshots[gone.generation, gone.rank, gone.step]
                held -= gone.buffer.nbytes
        where = "the object store of the node that would hold them, as far as peer_bytes allows"
        require(held + needed, free=free, what="copies of snapshots", where=where)

    def snapshot(self, generation: int, rank: int, step: int) -> Snapshot:
        """One snapshot; GroupBroken if it is here no more."""
        with self._lock:
            snapshot = self._snapshots.get((generation, rank, step))
        if snapshot is None or not snapshot.buffer.sound:
            what = f"rank {rank}'s snapshot of step {step}"
            raise GroupBroken(generation=generation, reason=f"peer memory does not hold {what} here")
        return snapshot

    def evidence(self) -> tuple[PeerSnapshot, ...]:
        """What could be served now."""
        return tuple(
            PeerSnapshot(
                peer_store=self._peer_store,
                generation=generation,
                rank=rank,
                step=step,
                share=snapshot.replica,
            )
            for (generation, rank, step), snapshot in sorted(self._copy().items())
            if snapshot.buffer.sound
        )

    def steps(self) -> tuple[StepCommitted, ...]:
        """The last ones that came with snapshots, of which nobody else may know any more; oldest first."""
        with self._lock:
            return each_once(tuple(self._reports))

    def copied_bytes(self) -> int:
        """Bytes of other nodes' snapshots in this node's object store."""
        return sum(snapshot.buffer.nbytes for snapshot in self._copy().values() if _is_copy(snapshot))

    def generations(self) -> frozenset[int]:
        return frozenset(generation for generation, _, _ in self._copy())

    def offer(self, generation: int, step: int) -> Offer:
        """Every box of a step, and one document of its ranks."""
        held = self._of(generation, step)
        return Offer(
            holds=Fragments.concat([snapshot.fragments for snapshot in held]),
            document=merged([snapshot.document for snapshot in held]),
        )

    def read(self, generation: int, step: int, wanted: Fragments) -> list[np.ndarray]:
        """The bytes of each box, uint8, row-major."""
        held = self._of(generation, step)
        found = [_read(held, wanted, row) for row in range(len(wanted))]
        if not all(snapshot.buffer.sound for snapshot in held):
            raise GroupBroken(generation=generation, reason=f"a snapshot of step {step} was overwritten")
        return found

    def digest_of(self, generation: int, step: int, boxes: Fragments) -> int:
        """Digest of boxes, to compare with what arrived elsewhere."""
        return of_boxes(boxes, self.read(generation, step, boxes)) & MASK

    def _of(self, generation: int, step: int) -> list[Snapshot]:
        held = [s for (g, _, at), s in self._copy().items() if (g, at) == (generation, step)]
        held = [snapshot for snapshot in held if snapshot.buffer.sound]
        if not held:
            raise GroupBroken(generation=generation, reason=f"peer memory has nothing of step {step} here")
        return held

    def _copy(self) -> dict[tuple[int, int, int], Snapshot]:
        with self._lock:
            return dict(self._snapshots)


def _is_copy(snapshot: Snapshot) -> bool:
    """Whether it is another node's: those of this node are in the segments of their workers."""
    return snapshot.buffer.arena is None


def _read(held: Iterable[Snapshot], wanted: Fragments, at: int) -> np.ndarray:
    """One box out of the snapshot that contains it."""
    key, box = int(wanted.key[at]), wanted.box(at)
    name, dtype = wanted.names[key], wanted.dtypes[key]
    for snapshot in held:
        boxes = snapshot.fragments
        if name not in boxes.names:
            continue
        for row in np.flatnonzero(boxes.key == boxes.names.index(name)).tolist():
            outer = boxes.box(row)
            if _contains(outer, box):
                data = np.frombuffer(snapshot.bytes_of(row), f"V{ITEM_BYTES[dtype]}")
                inner = data.reshape(outer.sizes)[box.within(outer).slices]
                return np.ascontiguousarray(inner).reshape(-1).view(np.uint8)
    raise GroupBroken(generation=0, reason=f"peer memory does not hold {box} of {name[0]} {name[1]} here")


def _contains(outer: Box, inner: Box) -> bool:
    return all(
        a <= b and b + m <= a + n
        for a, n, b, m in zip(outer.offsets, outer.sizes, inner.offsets, inner.sizes, strict=True)
    )
