"""Worker side of the peer tier: copies snapshots into the node's peer store.

With a peer store it is sealed in the peer store's segment, copied to another node, and written to storage
from there. Without one, or when it dies or hangs, the worker goes on alone: snapshots only for storage,
written from its own memory by a thread. A peer store is waited for as long as it says that it is there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from elastic_train.checkpoint.engine.arena import Arena, aligned
from elastic_train.checkpoint.engine.share import Share
from elastic_train.cluster.checkpoint_io import PartWriter, memory
from elastic_train.cluster.messages import Kept
from elastic_train.cluster.ray_calls import answer, answer_while
from elastic_train.control.events import StepCommitted
from elastic_train.control.schedule import peer_is_due
from elastic_train.geometry.fragments import Fragments

SLOTS = 3
"""Two generations of snapshots, and one that storage is being written from."""

LOOK_S = 5.0
"""How long a peer store may take before it is asked whether it is still there."""

PING_S = 5.0
"""How long a peer store that works on something may take to say so."""


class PeerTier:
    """Everything between a snapshot that is whole and the tiers that hold it.

    `every` is the peer tier's cadence in steps; "auto" weighs what a snapshot costs against what it saves.
    `steps` are those that this worker knows of: whoever goes on from a snapshot has to know them too.
    """

    def __init__(
        self,
        worker: str,
        writer: PartWriter,
        *,
        every: int | Literal["auto"],
        note: Callable[[str], None],
        steps: Callable[[], Sequence[StepCommitted]] = tuple,
    ) -> None:
        self._worker, self._writer, self._note, self._steps = worker, writer, note, steps
        self._every: int | Literal["auto"] = every
        self._peer_store: Any = None
        self._generation = 0
        self._shared = False  # whether this generation's slots are in a segment of the peer store
        self._used: Share | None = None  # the newest that is complete
        self._open: set[int] = set()  # steps of those under way
        self._flushing: set[Share] = set()
        self._first = True
        self._said = 0  # the last step of this generation that went along with a snapshot
        self._alone = ""  # why the last one has no copy on another node
        self._since = 0  # steps since the last snapshot
        self._at = time.monotonic()
        self._cost_s = 0.0
        self._lock = threading.Condition()
        self._threads = ThreadPoolExecutor(max_workers=2 * SLOTS, thread_name_prefix="keeping")

    def meet(self, peer_store: Any) -> None:
        """The peer store of this node, None where there is none; before a generation starts."""
        self._peer_store = peer_store

    # -- asked by the saver

    def memory(self, generation: int, size: int) -> Arena:
        """Slots for a generation's snapshots: in the peer store's segment if it has room, else here."""
        with self._lock:
            self._generation = generation
            self._used, self._open, self._first, self._said = None, set(), True, 0
            self._shared = False
        if self._peer_store is not None:
            size = aligned(size)
            try:
                reserving = self._peer_store.reserve.remote(self._worker, generation, size, SLOTS)
                path = self._answer(reserving)
                self._shared = True
                return Arena.attach(Path(path), size, slots=SLOTS)
            except RayError as error:
                why = error.cause if isinstance(error, RayTaskError) else error
                self._note(f"no snapshots in peer memory: {why}")
        return memory(generation, size)

    def awaited(self, timeout: float) -> bool:
        """Whether the snapshot before is complete, if one is due now by a number of steps: they lose at most
        that many, so none is left out. What a snapshot of `auto` would meet is no reason to wait.
        """
        with self._lock:
            if self._every == "auto" or self._since + 1 < self._every:
                return True
            return self._lock.wait_for(lambda: not self._open or not self._shared, timeout)

    def crowded(self, storage: bool) -> bool:
        """Whether a snapshot now would meet one that is not complete, or comes sooner than it is worth.

        One for storage waits for the last one that is being written, not for the copy on another node.
        """
        with self._lock:
            if storage:
                return bool(self._flushing)
            self._since += 1
            return not self._shared or bool(self._open) or not self._due()

    def taking(self, step: int) -> None:
        """A snapshot begins: the vote has shown that the last one is complete on every rank."""
        with self._lock:
            self._open.add(step)
            self._since, self._at = 0, time.monotonic()

    def dropped(self, step: int) -> None:
        with self._lock:
            self._open.discard(step)
            self._lock.notify_all()

    def deliver(self, share: Share) -> None:
        """On a thread of the engine, which must not wait for storage."""
        with self._lock:
            if share.storage:
                self._flushing.add(share)
            shared = self._shared
        call = self._keep if shared else self._write
        self._threads.submit(self._guarded, call, share)

    # -- private

    def _due(self) -> bool:
        seconds = time.monotonic() - self._at
        return peer_is_due(self._every, steps=self._since, seconds=seconds, cost_s=self._cost_s)

    def _guarded(self, call: Callable[[Share], None], share: Share) -> None:
        try:
            call(share)
        except Exception as error:  # noqa: BLE001 - becomes an event; a thread's error would be lost
            self._note(f"the snapshot of step {share.step} failed: {type(error).__name__}: {error}")
            self._complete(share, shared=False)
            self._flushed(share)
            share.release()
            if share.storage:
                self._writer.failed(share, f"{type(error).__name__}: {error}")

    def _write(self, share: Share) -> None:
        self._complete(share, shared=False)
        self._writer.save(share)
        self._flushed(share)

    def _keep(self, share: Share) -> None:
        first = self._first or share.generation != self._generation
        kept = _kept(self._worker, share, first=first, steps=self._news(share.generation))
        self._cost_s = share.seconds
        try:
            self._answer(self._peer_store.seal.remote(kept))
        except RayError as error:
            self._failed(error)
            if share.storage:
                self._write(share)
            else:
                self._complete(share, shared=False)
                share.release()
            return
        self._passed_on(kept)
        if share.storage:  # which waits for no other node
            self._threads.submit(self._guarded, lambda whole: self._flush(kept, whole), share)
        try:
            self._copied(share.step, self._answer(self._peer_store.copy.remote(kept, self._peer_store)))
        except RayError as error:
            self._failed(error)
            self._complete(share, shared=False)
            with self._lock:
                needed = share in self._flushing
            if not needed:
                share.release()
        else:
            self._complete(share, shared=True)

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

    def _passed_on(self, kept: Kept) -> None:
        with self._lock:
            if kept.generation == self._generation:
                self._said = max(self._said, *(report.step for report in kept.steps), 0)

    def _flush(self, kept: Kept, share: Share) -> None:
        try:
            self._answer(self._peer_store.flush.remote(kept))
        except RayError as error:
            self._failed(error)
            self._writer.save(share)
        self._flushed(share)

    def _copied(self, step: int, alone: str) -> None:
        """What keeps the copy from another node is said when it begins."""
        if alone and alone != self._alone:
            self._note(f"snapshots are on this node only since step {step}: {alone}")
        self._alone = alone

    def _complete(self, share: Share, *, shared: bool) -> None:
        """The snapshot is where it should be. The one before it may go: nothing new begins before a vote.

        Nothing begins any more in the arena of an older generation, so its slots need no release.
        """
        with self._lock:
            if share.generation != self._generation:
                return
            self._first = False
            pair = sorted((s for s in (self._used, share if shared else None) if s), key=lambda s: s.step)
            self._used = pair[-1] if pair and shared else None
            gone = [s for s in pair if s is not self._used and s not in self._flushing]
        for before in gone:
            before.release()
        self.dropped(share.step)  # it is under way no more, and there is a slot for the next one

    def _flushed(self, share: Share) -> None:
        with self._lock:
            self._flushing.discard(share)
            done = share is not self._used and share.step not in self._open
        if done:
            share.release()

    def _failed(self, error: RayError) -> None:
        if isinstance(error, RayTaskError):
            self._note(f"the peer store of this node could not take a snapshot: {error.cause}")
            return
        state = "hangs" if isinstance(error, GetTimeoutError) else f"is gone ({type(error).__name__})"
        self._note(f"the peer store of this node {state}: snapshots go to storage only")
        with self._lock:
            self._shared = False
            self._lock.notify_all()


def _kept(worker: str, share: Share, *, first: bool, steps: tuple[StepCommitted, ...]) -> Kept:
    rows = ((p.tensor, p.state, p.dtype, p.shape, p.box) for p in share.pieces)
    last = share.offsets[-1] + share.pieces[-1].data_bytes if share.pieces else 0
    return Kept(
        worker=worker,
        generation=share.generation,
        rank=share.rank,
        step=share.step,
        replica=share.replica,
        slot=share.slot,
        stamp=share.stamp,
        used=last,
        boxes=Fragments.of(rows),
        offsets=share.offsets,
        document=share.document,
        storage=share.storage,
        first=first,
        seconds=share.seconds,
        steps=steps,
    )
