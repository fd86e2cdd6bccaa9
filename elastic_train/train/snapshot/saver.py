"""Saving from the training loop: takes snapshots after a step, and makes the next update wait for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from elastic_train.checkpoint.engine.arena import Arena, aligned, slot_bytes
from elastic_train.checkpoint.engine.counts import Counts
from elastic_train.checkpoint.engine.engine import Engine, Pressure, Taken
from elastic_train.checkpoint.engine.lane import AtOnce, Lane
from elastic_train.checkpoint.engine.share import Share
from elastic_train.checkpoint.merging import METRICS
from elastic_train.checkpoint.piece import Piece
from elastic_train.train.snapshot.checkpoint_share import share
from elastic_train.train.snapshot.device_lane import DeviceLane
from elastic_train.train.snapshot.tensor_sources import sources
from elastic_train.train.state.live_fragments import TensorPart, own_share, parts
from elastic_train.train.state.shards import Shards

Described = Callable[[Shards], dict[str, Any]]
EXPECTED_SLOTS = 2
"""Tensors of optimizer state per parameter that memory is reserved for while none exists: Adam's."""


class Saver(Protocol):
    """Belongs to the training thread. `every_step`: a snapshot is wanted whenever one is possible."""

    every_step: bool

    def start(self, shards: Shards) -> None: ...
    def ready(self, timeout: float) -> bool:
        """Where no snapshot may be left out: whether the one before is whole, within `timeout` seconds."""
        ...

    def busy(self, *, storage: bool) -> bool:
        """Whether this rank has no slot for a snapshot now: it enters the vote, so that all ranks agree."""
        ...

    def fence(self) -> None:
        """Nothing may be written before this returns."""
        ...

    def take(self, shards: Shards, *, storage: bool, wait: bool) -> None: ...
    def end(self) -> None:
        """No step of this generation runs any more; what was begun is still handed on."""
        ...


class Direct:
    """Hands on live memory at the step boundary and waits: for state that is small, and for tests."""

    every_step = False

    def __init__(self, described: Described, deliver: Callable[[Share], None]) -> None:
        self._described, self._deliver = described, deliver

    def start(self, shards: Shards) -> None:
        return None

    def ready(self, timeout: float) -> bool:
        return True

    def busy(self, *, storage: bool) -> bool:
        return False

    def fence(self) -> None:
        return None

    def take(self, shards: Shards, *, storage: bool, wait: bool) -> None:
        assert shards.step is not None
        self._deliver(
            Share(
                generation=shards.generation,
                rank=shards.rank,
                step=shards.step,
                pieces=tuple(share(tuple(parts(shards)))),
                document=self._described(shards) | {METRICS: dict(shards.metrics)},
            )
        )

    def end(self) -> None:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Note:
    shards: tuple[int, int]  # generation, rank
    replica: tuple[int, int]
    parts: tuple[TensorPart, ...]
    document: dict[str, Any]
    storage: bool


class Lazy:
    """Copies in the background into `memory(generation, bytes)`; `deliver` gets each whole share on a thread
    of the engine, and gives its slot back by `share.release()`.

    `crowded(storage)` says what beside the slots speaks against a snapshot now, such as a copy on another
    node that is not complete; `awaited(timeout)` waits for that where no snapshot may be left out. `taking`
    is told when one begins, `dropped` when it came to nothing.
    """

    def __init__(
        self,
        described: Described,
        deliver: Callable[[Share], None],
        *,
        memory: Callable[[int, int], Arena],
        note: Callable[[str], None],
        every_step: bool = False,
        crowded: Callable[[bool], bool] = lambda storage: False,
        awaited: Callable[[float], bool] = lambda timeout: True,
        taking: Callable[[int], None] = lambda step: None,
        dropped: Callable[[int], None] = lambda step: None,
    ) -> None:
        self.every_step = every_step
        self._described, self._deliver, self._memory, self._note = described, deliver, memory, note
        self._crowded, self._awaited = crowded, awaited
        self._taking, self._dropped = taking, dropped
        self._engine: Engine[_Note] | None = None
        self._reserved = 0
        self._before = Counts()

    @property
    def counts(self) -> Counts:
        """Of all generations of this process."""
        return self._before + self._engine.counts if self._engine is not None else self._before

    def start(self, shards: Shards) -> None:
        """Reserve memory for this generation, before its first step."""
        held = own_share(tuple(parts(shards)))
        sizes = [part.view.numel() * part.view.element_size() for part in held]
        if not any(shards.optimizer.state.values()):  # each may come to begin on a page of its own
            sizes = [aligned(size) for size in sizes for _ in range(1 + EXPECTED_SLOTS)]
        self._reserve(shards, slot_bytes(sizes))

    def ready(self, timeout: float) -> bool:
        return self._awaited(timeout)

    def busy(self, *, storage: bool) -> bool:
        engine = self._engine
        return engine is None or engine.free == 0 or self._crowded(storage)

    def fence(self) -> None:
        if self._engine is not None:
            self._engine.fence()

    def take(self, shards: Shards, *, storage: bool, wait: bool) -> None:
        assert shards.step is not None
        self._taking(shards.step)
        found = sources(own_share(tuple(parts(shards))))
        needed = slot_bytes(source.nbytes for source in found)
        if needed > self._reserved:
            self._reserve(shards, needed)
        assert self._engine is not None
        note = _Note(
            shards=(shards.generation, shards.rank),
            replica=_replica(shards),
            parts=tuple(source.part for source in found),
            document=self._described(shards) | {METRICS: dict(shards.metrics)},
            storage=storage,
        )
        pressure: Pressure | None = "wait" if wait else None
        self._engine.begin(shards.step, found, note, pressure=pressure)

    def end(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.retire()
            self._before = self._before + engine.counts

    # -- private

    def _reserve(self, shards: Shards, size: int) -> None:
        self.end()
        arena = self._memory(shards.generation, size)
        self._engine = Engine(
            arena,
            self._hand_on,
            budget=BUDGET,
            note=self._note,
            dropped=self._dropped,
            lane=self._lane(shards.device, arena),
        )
        self._reserved = size

    def _lane(self, device: torch.device, arena: Arena) -> Lane:
        if device.type == "cpu":
            return AtOnce()
        lane = DeviceLane(device, arena)
        if not lane.pinned:
            self._note("the memory for snapshots could not be pinned: copies from the device are slower")
        return lane

    def _hand_on(self, taken: Taken[_Note]) -> None:
        note = taken.payload
        generation, rank = note.shards
        self._deliver(
            Share(
                generation=generation,
                rank=rank,
                step=taken.step,
                pieces=tuple(
                    _piece(part, taken.bytes_of(place))
                    for part, place in zip(note.parts, taken.places, strict=True)
                ),
                document=note.document,
                storage=note.storage,
                replica=note.replica,
                slot=taken.slot,
                stamp=taken.stamp,
                seconds=taken.seconds,
                offsets=tuple(place.offset for place in taken.places),
                release=taken.release,
            )
        )


BUDGET = 10**9
"""Snapshots in a row that may fail: each is reported, and the controller decides what that means."""


def _replica(shards: Shards) -> tuple[int, int]:
    mesh = shards.plan.mesh
    return mesh.dp_index(shards.rank) // mesh.dp_shard, mesh.dp_replicate


def _piece(part: TensorPart, data: memoryview) -> Piece:
    return Piece(
        tensor=part.tensor,
        state=part.state,
        dtype=part.dtype,
        shape=part.shape,
        box=part.box,
        data=data,
    )
