"""Shards that are allocated and not filled yet: which fragments they need, and how they are filled."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from elastic_train.config import RunSpec
from elastic_train.data.identity import DataIdentity
from elastic_train.geometry.fragments import Fragments
from elastic_train.train.state import compatibility
from elastic_train.train.state import scalar_state as documents
from elastic_train.train.state.adopt_memory import adopt_memory
from elastic_train.train.state.fragment_index import FragmentIndex
from elastic_train.train.state.initial_values import agreed, give_values
from elastic_train.train.state.live_fragments import own_share, parts
from elastic_train.train.state.replica_exchange import ReadBoxes, fill_together
from elastic_train.train.state.shards import Shards
from elastic_train.train.state.tensor_digest import reduced_digest
from elastic_train.train.task import Task
from elastic_train.train.user_code_guard import UserCodeGuard


class UnfilledShards:
    """The shards of a generation from their allocation until they train, with memory for optimizer state.

    `filled_bytes` of `needed_bytes` have come; any thread may look.
    """

    def __init__(self, task: Task, spec: RunSpec, shards: Shards, guard: UserCodeGuard) -> None:
        self._task, self._spec, self._guard = task, spec, guard
        self._filled: dict[tuple[str, str], torch.Tensor] = {}
        self._known: FragmentIndex | None = None  # until tensors get other memory
        self.shards = shards
        self.needed_bytes = self.filled_bytes = 0

    def needs(
        self, states: Iterable[tuple[str, str]] | Fragments | None = None, *, foreign: bool = False
    ) -> Fragments:
        """The boxes that this rank must be given. `states` are the (tensor, state) that exist anywhere.

        State of the optimizer that exists gets memory here. A table also tells dtypes and shapes: whatever
        doesn't fit is a TensorMismatch; with names alone a state has those of its parameter. None: parameters
        and buffers only. Buffers that a `foreign` state lacks have their initial values.
        """
        if not isinstance(states, Fragments):
            self._take_memory(states or (), {})
            return self._counted(self._index().table())
        kinds = compatibility.kinds_of(self.shards, states, foreign=foreign)
        initial = compatibility.check(self.shards, kinds, foreign=foreign)
        # Stages lack unlike buffers, and all ranks initialise together.
        if foreign and not self._agreed(not initial):
            self.initialise()
        self._take_memory(kinds, kinds)
        table = self._index().table()
        wanted = np.array([table.names[key] not in initial for key in table.key.tolist()], bool)
        return self._counted(table.take(wanted))

    def adopt(self, boxes: Fragments, held: FragmentIndex) -> Fragments:
        """Use the memory of a local state for what a rank keeps as it is; the boxes that are left to copy.

        That state may be read until `go`, and is written by nobody any more.
        """
        taken = adopt_memory(self.shards, self._filled, boxes, here=self._index(), held=held)
        self._known = None
        self._came(boxes.take(taken))
        return boxes.take(~taken)

    def fill(self, boxes: Fragments, arrays: Sequence[np.ndarray]) -> None:
        """Copy bytes into the shards."""
        self._index().write(boxes, arrays)
        self._came(boxes)

    def memory(self, boxes: Fragments) -> Iterator[memoryview]:
        """Memory for the bytes of each box, in order. What was yielded is full when the next is asked for."""
        sizes = boxes.nbytes.tolist()
        for number, memory in enumerate(self._index().memory(boxes)):
            yield memory
            self.filled_bytes += sizes[number]

    def fill_together(self, boxes: Fragments, read: ReadBoxes) -> None:
        """Fill boxes that all replicas of the shards need: each reads a share and gives it to the others.

        All ranks call it equally often, replicas with the same boxes.
        """
        fill_together(self._index(), boxes, read, self.shards.place.devices, self._came)

    def initialise(self) -> tuple[str, ...]:
        """Every tensor gets its initial value. All ranks call it; sentences that a person should see."""
        with self._guard.at("initialising", 0):
            notes = give_values(self._task, self._spec, self.shards)
        self._known = None
        self.shards.step = 0
        return notes

    def load(self, document: dict[str, Any], identity: DataIdentity) -> list[str]:
        """Take a document's scalars, after `fill`; sentences about what differs from the code."""
        data = document.get("data")
        if data is not None:  # other systems don't say what they trained on
            DataIdentity(length=data["length"], fingerprint=data["fingerprint"]).require(identity)
        self._known = None
        return documents.restore(self.shards, document, self._filled)

    def digest(self) -> int:
        """Digest of the whole state, the same on every rank. All ranks call it, replicas share the work."""
        own = FragmentIndex(own_share(tuple(parts(self.shards)))).digest()
        with self._guard.collective("comparing digests", self.shards.step or 0):
            return reduced_digest(own, device=self.shards.device.type)

    def digest_of(self, boxes: Fragments) -> int:
        """Digest of boxes that were filled, to compare with what those had who gave them."""
        return self._index().digest_of(boxes)

    def _take_memory(self, states: Iterable[compatibility.Name], kinds: compatibility.Kinds) -> None:
        self._filled, self._known = compatibility.memory_for(self.shards, states, kinds), None

    def _counted(self, needs: Fragments) -> Fragments:
        self.needed_bytes, self.filled_bytes = int(needs.nbytes.sum()), 0
        return needs

    def _came(self, boxes: Fragments) -> None:
        self.filled_bytes += int(boxes.nbytes.sum())

    def _agreed(self, holds: bool) -> bool:
        with self._guard.collective("initialising", 0):
            return agreed(self.shards, holds)

    def _index(self) -> FragmentIndex:
        if self._known is None:
            self._known = FragmentIndex(parts(self.shards, extra=self._filled))
        return self._known
