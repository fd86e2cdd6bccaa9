"""Measure how often a peer store's snapshots come and what memory they take, and report it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from elastic_train.cluster.messages import SealedSnapshot
from elastic_train.control.events import PeersHeld

TELL_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotSizes:
    """Bytes, as `PeersHeld` has them."""

    own: int
    copies: int
    room: int
    spilled: int


class PeerFigures:
    """Safe from several threads. Counts one rank's snapshots: those of others are of the same steps."""

    def __init__(
        self,
        node: str,
        sizes: Callable[[], SnapshotSizes],
        post: Callable[[PeersHeld], None],
        *,
        clock: Callable[[], float],
    ) -> None:
        self._node, self._sizes, self._post, self._clock = node, sizes, post, clock
        self._spilled = sizes().spilled  # before there was anything of ours
        self._of: tuple[str, int] | None = None  # worker, generation
        self._first = self._count = 0  # the step that is counted from, and snapshots since
        self._reported: float | None = None
        self._lock = threading.Lock()

    def sealed(self, sealed: SealedSnapshot) -> None:
        """A snapshot is whole. Says what there is to say if that is due."""
        snapshot = sealed.snapshot
        key = (sealed.worker, snapshot.generation)
        now = self._clock()
        with self._lock:
            if self._of is None or snapshot.generation > self._of[1]:
                self._of, self._first, self._count = key, snapshot.step, 0
                return
            if key != self._of:
                return
            self._count += 1
            if self._reported is not None and now - self._reported < TELL_S:
                return
            every = (snapshot.step - self._first) / self._count
            self._reported, self._first, self._count = now, snapshot.step, 0
        sizes = self._sizes()
        self._post(
            PeersHeld(
                at=0.0,
                node=self._node,
                step=snapshot.step,
                every=every,
                cost_s=sealed.cost_s,
                own=sizes.own,
                copies=sizes.copies,
                room=sizes.room,
                spilled=max(sizes.spilled - self._spilled, 0),
            )
        )
