"""Snapshots in one peer store: of its own node's workers, and copies of another node's.

A snapshot for peer memory begins only after the vote said that the one before it is complete on every rank,
so of two the older is complete wherever the newer isn't yet. A checkpoint's does not wait: a third one stays.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from elastic_train.checkpoint.engine.arena import SPARE, Arena, require
from elastic_train.checkpoint.merging import merged
from elastic_train.checkpoint.piece import Piece
from elastic_train.cluster.messages import Kept, Offer
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WorkerSnapshots:
    """One snapshot. `arena` is None where `data` is a copy of its own."""

    kept: Kept
    data: np.ndarray  # uint8
    arena: Arena | None = None

    @property
    def sound(self) -> bool:
        """Whether the bytes are still those of the snapshot."""
        return self.arena is None or self.arena.stamp(self.kept.slot) == self.kept.stamp

    def bytes_of(self, row: int) -> np.ndarray:
        start = self.kept.offsets[row]
        return self.data[start : start + int(self.kept.boxes.nbytes[row])]

    def pieces(self) -> tuple[Piece, ...]:
        """The boxes as they are written to storage."""
        boxes = self.kept.boxes
        return tuple(
            Piece(
                tensor=boxes.names[key][0],
                state=boxes.names[key][1],
                dtype=boxes.dtypes[key],
                shape=tuple(boxes.shapes[key]),
                box=boxes.box(row),
                data=self.bytes_of(row),
            )
            for row, key in enumerate(boxes.key.tolist())
        )


class SnapshotStore:
    """Safe from several threads. `peer store` is the name that evidence knows it by."""

    def __init__(self, peer_store: str) -> None:
        self._peer_store = peer_store
        self._by_worker: dict[tuple[int, int, int], WorkerSnapshots] = {}  # by generation, rank, step
        self._reports: deque[StepCommitted] = deque(maxlen=REPORTS)
        self._lock = threading.Lock()

    def put(self, worker_snapshots: WorkerSnapshots) -> None:
        """Keep a snapshot; an older one of its rank goes, and with a second one older generations."""
        kept = worker_snapshots.kept
        with self._lock:
            self._by_worker[kept.generation, kept.rank, kept.step] = worker_snapshots
            self._reports += kept.steps
            steps = sorted(s for g, r, s in self._by_worker if (g, r) == (kept.generation, kept.rank))
            for step in steps[:-STEPS]:
                del self._by_worker[kept.generation, kept.rank, step]
            if not kept.first:
                self._by_worker = {key: b for key, b in self._by_worker.items() if key[0] >= kept.generation}

    def make_room(self, kept: Kept, free: int) -> None:
        """Before a copy comes into an object store of `free` bytes: MemoryTooSmall where it would not fit.

        Copies that are held are never spilled, so a store that is full would keep everybody waiting. An older
        step of the same rank goes for it, as long as one stays. Room for what this node sends on stays free.
        """
        with self._lock:
            own = sorted((b for b in self._by_worker.values() if b.arena is None), key=lambda b: b.kept.step)
            held = sum(b.data.nbytes for b in own)
            older = [b for b in own if b.kept.rank == kept.rank][:-1]
            while older and held + 2 * kept.used > free * (1 - SPARE):
                worker_snapshots = older.pop(0)
                del self._by_worker[
                    worker_snapshots.kept.generation, worker_snapshots.kept.rank, worker_snapshots.kept.step
                ]
                held -= worker_snapshots.data.nbytes
        where = "the object store of the node that would hold them"
        require(held + 2 * kept.used, free=free, what="copies of snapshots", where=where)

    def worker_snapshots(self, generation: int, rank: int, step: int) -> WorkerSnapshots:
        """One snapshot; GroupBroken if it is here no more."""
        with self._lock:
            worker_snapshots = self._by_worker.get((generation, rank, step))
        if worker_snapshots is None or not worker_snapshots.sound:
            what = f"rank {rank}'s snapshot of step {step}"
            raise GroupBroken(generation=generation, reason=f"peer memory does not hold {what} here")
        return worker_snapshots

    def snapshots(self) -> tuple[PeerSnapshot, ...]:
        """What could be served now."""
        return tuple(
            PeerSnapshot(
                peer_store=self._peer_store,
                generation=generation,
                rank=rank,
                step=step,
                share=worker_snapshots.kept.replica,
            )
            for (generation, rank, step), worker_snapshots in sorted(self._copy().items())
            if worker_snapshots.sound
        )

    def steps(self) -> tuple[StepCommitted, ...]:
        """The last ones that came with snapshots, of which nobody else may know any more; oldest first."""
        with self._lock:
            return each_once(tuple(self._reports))

    def copied_bytes(self) -> int:
        """What is held for other nodes, in this node's object store."""
        return sum(
            worker_snapshots.data.nbytes
            for worker_snapshots in self._copy().values()
            if worker_snapshots.arena is None
        )

    def generations(self) -> frozenset[int]:
        return frozenset(generation for generation, _, _ in self._copy())

    def offer(self, generation: int, step: int) -> Offer:
        """Every box of a step, and one document of its ranks."""
        snapshots_by_worker = self._of(generation, step)
        return Offer(
            holds=Fragments.concat([worker_snapshots.kept.boxes for worker_snapshots in snapshots_by_worker]),
            document=merged([worker_snapshots.kept.document for worker_snapshots in snapshots_by_worker]),
        )

    def read(self, generation: int, step: int, wanted: Fragments) -> list[np.ndarray]:
        """The bytes of each box, uint8, row-major."""
        snapshots_by_worker = self._of(generation, step)
        found = [_read(snapshots_by_worker, wanted, row) for row in range(len(wanted))]
        if not all(worker_snapshots.sound for worker_snapshots in snapshots_by_worker):
            raise GroupBroken(generation=generation, reason=f"a snapshot of step {step} was overwritten")
        return found

    def digest_of(self, generation: int, step: int, boxes: Fragments) -> int:
        """Digest of boxes, to compare with what arrived elsewhere."""
        return of_boxes(boxes, self.read(generation, step, boxes)) & MASK

    def _of(self, generation: int, step: int) -> list[WorkerSnapshots]:
        snapshots_by_worker = [
            b for (g, _, s), b in self._copy().items() if (g, s) == (generation, step) and b.sound
        ]
        if not snapshots_by_worker:
            raise GroupBroken(generation=generation, reason=f"peer memory has nothing of step {step} here")
        return snapshots_by_worker

    def _copy(self) -> dict[tuple[int, int, int], WorkerSnapshots]:
        with self._lock:
            return dict(self._by_worker)


def _read(snapshots_by_worker: Iterable[WorkerSnapshots], wanted: Fragments, at: int) -> np.ndarray:
    """One box out of the book that contains it."""
    key, box = int(wanted.key[at]), wanted.box(at)
    name, dtype = wanted.names[key], wanted.dtypes[key]
    for worker_snapshots in snapshots_by_worker:
        boxes = worker_snapshots.kept.boxes
        if name not in boxes.names:
            continue
        for row in np.flatnonzero(boxes.key == boxes.names.index(name)).tolist():
            outer = boxes.box(row)
            if _contains(outer, box):
                whole = worker_snapshots.bytes_of(row).view(f"V{ITEM_BYTES[dtype]}").reshape(outer.sizes)
                return np.ascontiguousarray(whole[box.within(outer).slices]).reshape(-1).view(np.uint8)
    raise GroupBroken(generation=0, reason=f"peer memory does not hold {box} of {name[0]} {name[1]} here")


def _contains(outer: Box, inner: Box) -> bool:
    return all(
        a <= b and b + m <= a + n
        for a, n, b, m in zip(outer.offsets, outer.sizes, inner.offsets, inner.sizes, strict=True)
    )
