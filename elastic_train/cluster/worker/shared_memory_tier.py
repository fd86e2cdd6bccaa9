"""Worker side of the peer tier: copies snapshots into the node's peer store.

A snapshot is sealed in the peer store's segment, copied to another node, and written to storage from there.
Without a segment, or when the peer store dies or hangs, the worker goes on alone, as in a run without one. It
waits for a peer store as long as that says that it is there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from elastic_train.checkpoint.engine.arena import Arena, aligned
from elastic_train.checkpoint.snapshot import Snapshot
from elastic_train.cluster.messages import SealedSnapshot
from elastic_train.cluster.ray_calls import answer, answer_while
from elastic_train.cluster.worker.direct_tier import DirectTier
from elastic_train.cluster.worker.snapshot_cadence import SnapshotCadence
from elastic_train.control.events import StepCommitted

SLOTS = 3
"""Two generations of snapshots, and one that storage is being written from."""

ROOM = 2
"""Slots that a generation needs until two of its snapshots are complete: then those of older ones go."""

LOOK_S = 5.0
"""How long a peer store may take before it is asked whether it is still there."""

PING_S = 5.0
"""How long a peer store that works on something may take to say so."""


class SharedMemoryTier:
    """Everything between a snapshot that is whole and the tiers that hold it.

    `every` is its cadence in steps; "auto" weighs what a snapshot costs against what it saves. `steps` are
    those that this worker knows of: a run that goes on from a snapshot has to know them too.
    """

    every_step = True

    def __init__(
        self,
        worker: str,
        direct: DirectTier,
        *,
        every: int | Literal["auto"],
        note: Callable[[str], None],
        steps: Callable[[], Sequence[StepCommitted]] = tuple,
    ) -> None:
        self._worker, self._direct, self._note, self._steps = worker, direct, note, steps
        self._peer_store: Any = None
        self._generation = 0
        self._shared = False  # whether this generation's slots are in a segment of the peer store
        self._segment: tuple[str, Arena] | None = None  # the path, and what is there
        self._used: Snapshot | None = None  # the newest that is complete
        self._older: set[Snapshot] = set()  # complete ones of older generations, in this one's arena
        self._replaced = False  # whether this generation has two that are complete, and needs no older ones
        self._pending: set[Snapshot] = set()  # whole, and not complete yet
        self._open: set[int] = set()  # steps of those under way
        self._flushing: set[Snapshot] = set()  # by the peer store
        self._first = True
        self._said = 0  # the last step of this generation that went along with a snapshot
        self._alone = ""  # why the last one has no copy on another node
        self._cadence = SnapshotCadence(every)
        self._lock = threading.Condition()
        self._threads = ThreadPoolExecutor(max_workers=2 * SLOTS, thread_name_prefix="peer tier")

    def meet(self, peer_store: Any) -> None:
        """The peer store of this node, None where there is none; before a generation starts."""
        self._peer_store = peer_store

    # -- asked by the saver

    @property
    def binding(self) -> bool:
        with self._lock:
            return self._cadence.binding

    def memory(self, generation: int, size: int) -> Arena:
        """In the peer store's segment if it has room, else here. What the generation before had is used again
        where it fits and enough of its slots are free.
        """
        with self._lock:
            self._generation = generation
            if self._used is not None:
                self._older.add(self._used)
            self._used, self._open, self._first, self._said = None, set(), True, 0
            self._replaced = False
            self._cadence.restart()
            self._shared = False
        if self._peer_store is not None:
            present, arena = self._segment or ("", None)
            if arena is None or not arena.fits(size) or arena.free < ROOM:
                present = ""
            aligned_size = aligned(size)
            try:
                reserving = self._peer_store.reserve.remote(
                    self._worker, generation, aligned_size, SLOTS, present=present
                )
                path = self._answer(reserving)
                if arena is not None and path == present:
                    there = arena
                else:
                    there = Arena.attach(Path(path), aligned_size, slots=SLOTS)
                with self._lock:
                    if there is not arena:
                        self._older = set()  # their slots are of no use any more
                    self._shared, self._segment = True, (path, there)
                return there
            except RayError as error:
                why = error.cause if isinstance(error, RayTaskError) else error
                self._note(f"no snapshots in peer memory: {why}")
        with self._lock:
            self._segment, self._older = None, set()
        return self._direct.memory(generation, size)

    def count_step(self) -> None:
        with self._lock:
            self._cadence.count_step()

    def step_took(self, seconds: float) -> None:
        with self._lock:
            unfinished, flushing = bool(self._open), bool(self._flushing)
            self._cadence.step_took(seconds, unfinished=unfinished, flushing=flushing)

    def ready(self, timeout: float) -> bool:
        """Whether the snapshot before is complete, if one is due now by a number of steps: they lose at most
        that many, so none is left out. What a snapshot of `auto` would meet is no reason to wait.
        """
        with self._lock:
            if not self._cadence.binding:
                return True
            return self._lock.wait_for(lambda: not self._open or not self._shared, timeout)

    def crowded(self, *, storage: bool) -> bool:
        """One for storage waits for the last one that is being written, not for the copy on another node."""
        with self._lock:
            if storage:
                return bool(self._flushing)
            return not self._shared or bool(self._open) or not self._cadence.due

    def begun(self, step: int) -> None:
        with self._lock:
            self._open.add(step)
            self._cadence.begun()

    def dropped(self, step: int) -> None:
        with self._lock:
            self._open.discard(step)
            self._lock.notify_all()

    def deliver(self, snapshot: Snapshot) -> None:
        with self._lock:
            self._pending.add(snapshot)
            if snapshot.storage:
                self._flushing.add(snapshot)
            shared = self._shared
        if shared:
            self._threads.submit(self._guarded, self._keep, snapshot)
        else:
            self._threads.submit(self._write_here, snapshot)

    # -- private

    def _guarded(self, call: Callable[[Snapshot], None], snapshot: Snapshot) -> None:
        try:
            call(snapshot)
        except Exception as error:  # noqa: BLE001 - becomes an event; a thread's error would be lost
            self._complete(snapshot, shared=False)
            self._flushed(snapshot)
            self._direct.failed(snapshot, error)

    def _keep(self, snapshot: Snapshot) -> None:
        first = self._first or snapshot.generation != self._generation
        sealed = SealedSnapshot(
            worker=self._worker,
            snapshot=snapshot.detached(),
            first=first,
            steps=self._news(snapshot.generation),
            cost_s=self._cadence.cost_s,
        )
        self._cadence.copy_s = snapshot.seconds
        try:
            self._answer(self._peer_store.seal.remote(sealed))
        except RayError as error:
            self._failed(error)
            self._write_here(snapshot)
            return
        self._passed_on(sealed)
        if snapshot.storage:  # which waits for no other node
            self._threads.submit(self._guarded, lambda whole: self._flush(sealed, whole), snapshot)
        try:
            alone = self._answer(self._peer_store.copy.remote(sealed, self._peer_store))
        except RayError as error:
            self._failed(error)
            self._complete(snapshot, shared=False)
            with self._lock:
                needed = snapshot in self._flushing
            if not needed:
                snapshot.buffer.release()
        else:
            self._copied(snapshot.step, alone)
            self._complete(snapshot, shared=True)

    def _write_here(self, snapshot: Snapshot) -> None:
        """Without the peer store: to storage from this process, or nowhere."""
        self._complete(snapshot, shared=False)
        if snapshot.storage:
            self._direct.write(snapshot)
        self._flushed(snapshot)

    def _answer(self, call: Any) -> Any:
        """What the peer store answers, however long it takes. GetTimeoutError where it says nothing at
        all.
        """
        peer_store = self._peer_store
        return answer_while(call, lambda: answer(peer_store.ready.remote(), PING_S), LOOK_S)

    def _news(self, generation: int) -> tuple[StepCommitted, ...]:
        """The steps that the peer store may not know, and the last one again, which may have metrics by
        now.
        """
        with self._lock:
            said = self._said if generation == self._generation else 0
        return tuple(r for r in self._steps() if r.generation == generation and r.step >= said)

    def _passed_on(self, sealed: SealedSnapshot) -> None:
        with self._lock:
            if sealed.snapshot.generation == self._generation:
                self._said = max(self._said, *(report.step for report in sealed.steps), 0)

    def _flush(self, sealed: SealedSnapshot, snapshot: Snapshot) -> None:
        try:
            self._answer(self._peer_store.flush.remote(sealed))
        except RayError as error:
            self._failed(error)
            self._direct.write(snapshot)
        self._flushed(snapshot)

    def _copied(self, step: int, alone: str) -> None:
        """What keeps the copy from another node is said when it begins."""
        if alone and alone != self._alone:
            self._note(f"snapshots are on this node only since step {step}: {alone}")
        self._alone = alone

    def _complete(self, snapshot: Snapshot, *, shared: bool) -> None:
        """The snapshot is where it should be. The one before it may go: nothing new begins before a vote.

        Those of an older generation stay until there are two of this one, of which the first is complete on
        all ranks.
        """
        with self._lock:
            self._pending.discard(snapshot)
            if snapshot.generation != self._generation:
                if shared and not self._replaced:
                    self._older.add(snapshot)
                elif snapshot not in self._flushing:
                    snapshot.buffer.release()
                return
            self._replaced |= shared and not self._first
            self._first &= not shared
            pair = sorted((s for s in (self._used, snapshot if shared else None) if s), key=lambda s: s.step)
            self._used = pair[-1] if pair and shared else None
            gone = [s for s in pair if s is not self._used and s not in self._flushing]
            if self._replaced:
                gone += [s for s in self._older if s not in self._flushing]
                self._older = set()
        for before in gone:
            before.buffer.release()
        self.dropped(snapshot.step)  # it is under way no more, and there is a slot for the next one

    def _flushed(self, snapshot: Snapshot) -> None:
        with self._lock:
            self._flushing.discard(snapshot)
            done = snapshot is not self._used and snapshot not in self._older | self._pending
        if done:
            snapshot.buffer.release()

    def _failed(self, error: RayError) -> None:
        if isinstance(error, RayTaskError):
            self._note(f"the peer store of this node could not take a snapshot: {error.cause}")
            return
        state = "hangs" if isinstance(error, GetTimeoutError) else f"is gone ({type(error).__name__})"
        self._note(f"the peer store of this node {state}: snapshots go to storage only")
        with self._lock:
            self._shared = False
            self._lock.notify_all()
