"""Local states of a member: the shards that train, and shards kept for other workers, by generation."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from elastic_train.errors import GroupBroken
from elastic_train.geometry.fragments import Fragments
from elastic_train.recovery.evidence import LocalState
from elastic_train.recovery.replayable_steps import Sent
from elastic_train.train.boundary.boundary_log import BoundaryLog
from elastic_train.train.state.carried_logs import reported
from elastic_train.train.state.fragment_index import FragmentIndex
from elastic_train.train.state.kept_gradients import KeptGradients
from elastic_train.train.state.live_fragments import parts
from elastic_train.train.state.shards import Shards


@dataclass(frozen=True, slots=True, kw_only=True)
class _Helped:
    """What is left of a replay that was only helped in: the log of what its share sent."""

    generation: int
    stage: int
    log: BoundaryLog


class LocalStates:
    """Safe from any thread; the training thread alone changes it.

    Of one generation it may hold several ranks' shards: its own, and those that it replayed.
    """

    def __init__(self) -> None:
        self._shards: tuple[Shards, ...] = ()
        self._continued: int | None = None  # the generation whose state the present shards began with
        self._helped: tuple[_Helped, ...] = ()
        self._lock = threading.Lock()
        # of (generation, step), made when first read from
        self._index: tuple[int, int, FragmentIndex] | None = None

    @property
    def current(self) -> Shards:
        """The one that trains."""
        (shards,) = self._shards
        return shards

    def replace(self, shards: Shards | None, *, continued: int | None = None) -> None:
        """This one is the state, whatever was held before is dropped.

        Until its first update it is also the state of the generation that it `continued`, for ranks that
        are filled from here meanwhile.
        """
        with self._lock:
            self._shards, self._continued = () if shards is None else (shards,), continued
            helped, self._helped = self._helped, ()
            self._index = None
        for old in helped:
            old.log.close()

    def add(self, shards: Shards) -> None:
        """Hold these too; where they only helped in a replay, for their log alone."""
        with self._lock:
            if shards.substituted is None or shards.substituted.ranks:
                self._shards += (shards,)
            elif shards.log is not None:
                self._helped += (
                    _Helped(generation=shards.generation, stage=shards.edges.first, log=shards.log),
                )
            self._index = None

    def moved(self) -> None:
        """The shards of a generation were changed: what is known of their tensors holds no more."""
        with self._lock:
            self._index = None

    def local_states(self) -> tuple[LocalState, ...]:
        """Everything complete that could be given."""
        return tuple(local_state for shards in self.every() for local_state in shards.local_states())

    def every(self) -> tuple[Shards, ...]:
        """Whole or torn."""
        with self._lock:
            return self._shards

    def of(self, generation: int) -> tuple[Shards, ...]:
        """The whole shards of a generation; GroupBroken where there are none."""
        held = tuple(s for s in self.every() if s.generation == generation and s.step is not None)
        if not held:
            raise GroupBroken(generation=generation, reason="this worker does not hold its shards any more")
        return held

    def kept_logs(self, generation: int) -> tuple[tuple[BoundaryLog, int], ...]:
        """The logs of a generation, and whose stage's they are; GroupBroken where there is none."""
        with self._lock:
            own = [(s.log, s.edges.first) for s in self._shards if s.generation == generation and s.log]
            helped = [(h.log, h.stage) for h in self._helped if h.generation == generation]
        if not own and not helped:
            raise GroupBroken(generation=generation, reason="this worker keeps no log of it")
        return (*own, *helped)

    def kept(self, generation: int, step: int) -> KeptGradients | None:
        """What was computed here of a step that broke, if the local state is right before it."""
        held = [s for s in self.every() if s.generation == generation and s.step == step - 1]
        kept = held[0].kept if len(held) == 1 else None
        return kept if kept is not None and kept.step == step else None

    def logs(self) -> tuple[Sent, ...]:
        """What is kept for the replay of other stages. Waits a moment for what is being copied."""
        return tuple(sent for shards in self.every() if (sent := reported(shards)) is not None)

    def forget(self, generation: int, step: int) -> None:
        """A checkpoint of a generation's step is durable: nothing up to it is replayed any more."""
        for shards in self.every():
            if shards.log is not None and shards.generation == generation:
                shards.log.forget(step)

    def step_of(self, generation: int) -> int:
        """The step of a generation's local state."""
        step = self.of(generation)[0].step
        assert step is not None
        return step

    def table(self, generation: int) -> Fragments:
        """The boxes of a local state."""
        return self.serving(generation, self.step_of(generation)).table()

    def read(self, generation: int, step: int, wanted: Fragments) -> list[np.ndarray]:
        """The bytes of boxes of a local state, uint8; GroupBroken if it is not at that step any more."""
        with self.beside_training():
            return self.serving(generation, step).read(wanted)

    def digest_of(self, generation: int, step: int, boxes: Fragments) -> int:
        """Digest of boxes of a local state, to compare with what arrived elsewhere."""
        with self.beside_training():
            return self.serving(generation, step).digest_of(boxes)

    @contextmanager
    def beside_training(self) -> Iterator[None]:
        """Inside, what a device reads waits for what made the tensors alone, and not for a collective that is
        enqueued behind: that one may wait for a rank which is filled from here.
        """
        with self._lock:
            made = [shards.made for shards in self._shards if shards.made is not None]
            device = next((shards.device for shards in self._shards), None)
        if device is None or not made:
            yield
            return
        # Of a priority that no communicator's stream has: torch gives one stream to several who ask.
        stream = torch.Stream(device, priority=-1)
        for event in made:
            stream.wait_event(event)
        with stream:
            yield

    def serving(self, generation: int, step: int) -> FragmentIndex:
        """The fragments of a local state; GroupBroken if it is not at that step any more."""
        with self._lock:
            begun = self._continued == generation and len(self._shards) == 1
            held = self._shards if begun else ()
        held = held or self.of(generation)
        with self._lock:
            for shards in held:
                with shards.lock:
                    if shards.step != step:
                        raise GroupBroken(
                            generation=generation, reason=f"this worker holds step {shards.step}, not {step}"
                        )
            if self._index is None or self._index[:2] != (generation, step):
                self._index = (
                    generation,
                    step,
                    FragmentIndex(part for shards in held for part in parts(shards)),
                )
            return self._index[2]
