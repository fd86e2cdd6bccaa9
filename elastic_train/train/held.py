"""What a member holds of the training state, by generation: one that trains, and what is kept for others."""

from __future__ import annotations

import threading

from elastic_train.errors import GroupBroken
from elastic_train.recovery.evidence import Holding
from elastic_train.train.fragments import parts
from elastic_train.train.serving import Index
from elastic_train.train.shards import Shards


class Held:
    """Safe from any thread; the training thread alone changes it."""

    def __init__(self) -> None:
        self._shards: dict[int, Shards] = {}
        self._lock = threading.Lock()
        self._index: tuple[int, int, Index] | None = None  # of (generation, step), made when first read from

    @property
    def current(self) -> Shards:
        """The one that trains."""
        (shards,) = self._shards.values()
        return shards

    def replace(self, shards: Shards | None) -> None:
        """This one is the state, whatever was held before is dropped."""
        with self._lock:
            self._shards = {} if shards is None else {shards.generation: shards}
            self._index = None

    def moved(self) -> None:
        """The shards of a generation were changed: what is known of their tensors holds no more."""
        with self._lock:
            self._index = None

    def holdings(self) -> tuple[Holding, ...]:
        """Everything complete that could be given."""
        found = (shards.holding() for shards in self._shards.values())
        return tuple(holding for holding in found if holding is not None)

    def of(self, generation: int) -> Shards:
        """GroupBroken where they are not held, or torn."""
        with self._lock:
            held = self._shards.get(generation)
        if held is None or held.step is None:
            raise GroupBroken(generation=generation, reason="this worker does not hold its shards any more")
        return held

    def serving(self, generation: int, step: int) -> Index:
        """The parts of a holding at a step; GroupBroken if it is not held at that step any more."""
        held = self.of(generation)
        with self._lock, held.lock:
            if held.step != step:
                raise GroupBroken(
                    generation=generation, reason=f"this worker holds step {held.step}, not {step}"
                )
            if self._index is None or self._index[:2] != (generation, step):
                self._index = (generation, step, Index(parts(held)))
            return self._index[2]
