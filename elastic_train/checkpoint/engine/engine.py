"""Snapshot engine: copies state in the background while the next step computes, and delivers it when whole.

    engine.begin(snapshot, sources)          # right after the step's update, before the next forward
    engine.fence()                           # right before the next update: what is not copied yet is
    ...                                      # `deliver(snapshot)` is called on a thread of the engine
    snapshot.buffer.release()                # the receiver needs the slot no more

Lazy, asynchronous copying as in DataStates-LLM (Maurya et al., HPDC 2024). Theirs copies device tensors while
they are immutable; here a version and a fingerprint prove that they were.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from elastic_train.checkpoint.engine.arena import Arena
from elastic_train.checkpoint.engine.audit import ALL, audited
from elastic_train.checkpoint.engine.copying import Copying
from elastic_train.checkpoint.engine.counts import Counts
from elastic_train.checkpoint.engine.lane import AtOnce, CopyLane
from elastic_train.checkpoint.engine.source import Source
from elastic_train.checkpoint.snapshot import Buffer, Snapshot
from elastic_train.errors import MemoryTooSmall

REMEDY = (
    "From now on it is copied before the next step begins, which takes time; write parameters in the "
    "optimizer only."
)


class Engine:
    """`begin`, `fence` and `close` belong to the training thread, the rest to any.

    `deliver` may raise. A snapshot that fails stops no training: `dropped` is called with its step, `note`
    with a sentence for a person. `lane` is how bytes get into the arena; the engine closes it.
    """

    def __init__(
        self,
        arena: Arena,
        deliver: Callable[[Snapshot], None],
        *,
        note: Callable[[str], None] = lambda _: None,
        dropped: Callable[[int], None] = lambda _: None,
        lane: CopyLane | None = None,
    ) -> None:
        self._lane: CopyLane = lane or AtOnce()
        self._arena, self._deliver, self._note, self._dropped = arena, deliver, note, dropped
        self._counts = Counts()
        self._lock = threading.Lock()  # guards _counts
        self._current: Copying | None = None
        self._eager: set[str] = set()
        self._copies: queue.SimpleQueue[tuple[int, Copying, Snapshot] | None] = queue.SimpleQueue()
        self._whole: queue.SimpleQueue[Snapshot | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._copy_all, name="snapshot", daemon=True),
            threading.Thread(target=self._deliver_all, name="deliver", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def counts(self) -> Counts:
        with self._lock:
            return self._counts

    @property
    def free(self) -> int:
        """Slots that nobody uses."""
        return self._arena.free

    def begin(self, snapshot: Snapshot, sources: Sequence[Source], *, wait: bool = False) -> bool:
        """Start to fill a snapshot that has no bytes yet; False where every slot is in use.

        With `wait` it waits for a slot instead. Sources are those of the snapshot's fragments, in the
        order of their next writes. Raises MemoryTooSmall if they exceed a slot.
        """
        assert len(sources) == len(snapshot.fragments)
        began = time.monotonic()
        self.fence()
        slot = self._slot(wait)
        if slot is None:
            return False
        checked = audited(self._counts.begun, len(sources))
        memory = self._arena.slot(slot)
        self._lane.follow()
        copying = Copying(sources, memory, checked, eager=self._eager, lane=self._lane)
        if copying.nbytes > self._arena.size:
            self._arena.give_back(slot)
            raise MemoryTooSmall(
                what="a snapshot", where="its slot", needed=copying.nbytes, free=self._arena.size
            )
        self._arena.open(slot)
        copying.copy_unsettled()
        self._current = copying
        self._copies.put((slot, copying, snapshot))
        self._count(begun=1, bytes=sum(s.nbytes for s in sources), blocked_s=time.monotonic() - began)
        return True

    def fence(self, key: str | None = None) -> None:
        """Before a write: everything that will be written up to the fragment `key`, or all, is copied."""
        current = self._current
        if current is None:
            return
        began = time.monotonic()
        current.finish(key)
        if key is None:
            self._current = None
            if self._counts.begun <= ALL:
                self._learn(current.restless())
        self._count(blocked_s=time.monotonic() - began)

    def retire(self) -> None:
        """Begin nothing more. Live memory is free to change when this returns; the rest ends by itself."""
        self.fence()
        self._lane.wait()  # the next writer does not know of the copies
        self._copies.put(None)

    def close(self) -> None:
        """End what was begun and deliver it."""
        self.retire()
        for thread in self._threads:
            thread.join()

    # -- private

    def _slot(self, wait: bool) -> int | None:
        slot = self._arena.take()
        if slot is not None:
            return slot
        self._count(**{"waited" if wait else "skipped": 1})
        return self._arena.take(None) if wait else None

    def _copy_all(self) -> None:
        while (job := self._copies.get()) is not None:
            slot, copying, snapshot = job
            step = snapshot.step
            began = time.monotonic()
            copying.land()
            changed = copying.changed() if copying.error is None else ()
            seconds = time.monotonic() - began
            self._count(copy_s=seconds)
            if copying.error is not None:
                self._fail(step, f"{type(copying.error).__name__}: {copying.error}")
            elif changed:
                self._tear(step, changed)
            else:
                buffer = Buffer(
                    offsets=tuple(place.offset for place in copying.places),
                    nbytes=copying.nbytes,
                    memory=copying.memory[: copying.nbytes],
                    arena=self._arena,
                    slot=slot,
                    stamp=self._arena.seal(slot),
                    release=_once(lambda slot=slot: self._arena.give_back(slot)),
                )
                self._whole.put(replace(snapshot, buffer=buffer, seconds=seconds))
                continue
            self._arena.give_back(slot)
            self._dropped(step)
        self._lane.close()
        self._whole.put(None)

    def _learn(self, restless: tuple[str, ...]) -> None:
        """A job's habits show in its first steps, even where each copy happened to be in time."""
        new = sorted(set(restless) - self._eager)
        if not new:
            return
        self._eager |= set(new)
        self._note(f"{_listed(new)} changed outside the update. {REMEDY}")

    def _tear(self, step: int, changed: tuple[str, ...]) -> None:
        """What changed under a copy is copied before training goes on, from the next snapshot on."""
        self._eager |= set(changed)
        self._count(torn=1)
        why = f"{_listed(changed)} changed outside the update"
        self._note(f"the snapshot of step {step} was dropped: {why}. {REMEDY}")

    def _deliver_all(self) -> None:
        while (snapshot := self._whole.get()) is not None:
            try:
                self._deliver(snapshot)
            except Exception as error:  # noqa: BLE001 - storage's, or memory's: this snapshot is lost alone
                snapshot.buffer.release()
                self._fail(snapshot.step, f"{type(error).__name__}: {error}")
                self._dropped(snapshot.step)
            else:
                self._count(delivered=1)

    def _fail(self, step: int, problem: str) -> None:
        self._count(failed=1)
        self._note(f"the snapshot of step {step} failed: {problem}")

    def _count(self, **more: float) -> None:
        with self._lock:
            self._counts = replace(self._counts, **{k: getattr(self._counts, k) + v for k, v in more.items()})


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _once(call: Callable[[], None]) -> Callable[[], None]:
    """The call, made the first time only: two holders of a slot may both give it up."""
    lock, left = threading.Lock(), [call]

    def release() -> None:
        with lock:
            due = left.pop() if left else None
        if due is not None:
            due()

    return release
