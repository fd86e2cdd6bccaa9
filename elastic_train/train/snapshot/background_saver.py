"""Snapshots that are copied in the background while the next step computes.

Their memory is reserved beside a generation's first steps. One in which a snapshot may not be left out waits
for it; until it is there, and may not be, the others take none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait

import torch

from elastic_train.checkpoint.engine.arena import Arena, aligned, slot_bytes
from elastic_train.checkpoint.engine.counts import Counts
from elastic_train.checkpoint.engine.engine import Engine
from elastic_train.checkpoint.engine.lane import AtOnce, CopyLane
from elastic_train.train.snapshot.device_lane import DeviceLane
from elastic_train.train.snapshot.peer_tier import PeerTier
from elastic_train.train.snapshot.saver import Described, empty_snapshot
from elastic_train.train.snapshot.tensor_sources import sources
from elastic_train.train.state.live_fragments import own_share, parts
from elastic_train.train.state.shards import Shards

EXPECTED_SLOTS = 2
"""Tensors of optimizer state per parameter that memory is reserved for while none exists: Adam's."""


class BackgroundSaver:
    """Copies into memory of `tier`, which gets each whole snapshot. `note` gets sentences for a person."""

    def __init__(self, described: Described, tier: PeerTier, note: Callable[[str], None]) -> None:
        self.every_step = tier.every_step
        self._described, self._tier, self._note = described, tier, note
        self._engine: Engine | None = None
        self._arena: Future[Arena] | None = None  # until there is an engine for it
        self._device = torch.device("cpu")
        self._reserved = 0
        self._before = Counts()

    @property
    def counts(self) -> Counts:
        """Of all generations of this process."""
        return self._before + self._engine.counts if self._engine is not None else self._before

    def start(self, shards: Shards) -> None:
        """Begin to reserve memory for this generation's snapshots."""
        held = own_share(tuple(parts(shards)))
        sizes = [part.view.numel() * part.view.element_size() for part in held]
        if not any(shards.optimizer.state.values()):  # each may come to begin on a page of its own
            sizes = [aligned(size) for size in sizes for _ in range(1 + EXPECTED_SLOTS)]
        self._reserve(shards.generation, shards.device, slot_bytes(sizes))

    def count_step(self) -> None:
        self._tier.count_step()

    def step_took(self, seconds: float) -> None:
        self._tier.step_took(seconds)

    def ready(self, timeout: float, *, storage: bool) -> bool:
        if self._arena is not None and not self._arena.done():
            if not storage and not self._tier.binding:
                return True
            if wait([self._arena], timeout).not_done:
                return False
        self._meet_engine()
        return self._tier.ready(timeout)

    def busy(self, *, storage: bool) -> bool:
        engine = self._engine
        return engine is None or engine.free == 0 or self._tier.crowded(storage=storage)

    def fence(self) -> None:
        if self._engine is not None:
            self._engine.fence()

    def take(self, shards: Shards, *, storage: bool, wait: bool) -> None:
        held = tuple(own_share(tuple(parts(shards))))
        snapshot = empty_snapshot(shards, held, self._described(shards), storage=storage)
        self._tier.begun(snapshot.step)
        found = sources(held)
        needed = slot_bytes(source.nbytes for source in found)
        if needed > self._reserved:
            self._reserve(shards.generation, shards.device, needed)
        self._meet_engine()
        assert self._engine is not None
        self._engine.begin(snapshot, found, wait=wait)

    def end(self) -> None:
        arena, self._arena = self._arena, None
        if arena is not None:  # nobody reserves any more once this returns
            wait([arena])
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.retire()
            self._before = self._before + engine.counts

    # -- private

    def _reserve(self, generation: int, device: torch.device, size: int) -> None:
        self.end()
        arena = self._arena = Future[Arena]()
        self._device, self._reserved = device, size

        def reserve() -> None:
            try:
                arena.set_result(self._tier.memory(generation, size))
            except BaseException as error:  # noqa: BLE001 - raised where the memory is wanted
                arena.set_exception(error)

        threading.Thread(target=reserve, name="reserve", daemon=True).start()

    def _meet_engine(self) -> None:
        """Once the memory is there; raises why it is not."""
        if self._arena is None:
            return
        reserved, self._arena = self._arena, None
        arena, device = reserved.result(), self._device
        lane: CopyLane = AtOnce()
        if device.type != "cpu":
            lane = DeviceLane(device, arena)
            if not lane.pinned:
                self._note("the memory for snapshots could not be pinned: copies from the device are slower")
        self._engine = Engine(
            arena,
            self._tier.deliver,
            note=self._note,
            dropped=self._tier.dropped,
            lane=lane,
        )
