"""What the planner knows of the machines: links, memory, cores."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from elastic_train.planner.plan import WorkerSlot


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Time of a message: `latency_s` and its bytes at `bytes_per_s` (Hockney's alpha and beta)."""

    latency_s: float = 0.0
    bytes_per_s: float = math.inf

    def seconds(self, nbytes: float) -> float:
        return self.latency_s + nbytes / self.bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The machines of a run; workers are alike up to `WorkerSlot.speed`.

    Layer times are those of a worker with its cores to itself. Where a node has fewer than its workers keep
    busy, all of them slow down, and so do messages, which the cores copy. `one_machine`: the nodes are parts
    of one machine and share `cores`.
    """

    inside: Link = Link()  # between workers of a node
    between: Link = Link()  # of a node to the others, shared by its workers
    memory_bytes: int | None = None  # of a worker; None: unknown, everything fits
    cores: float | None = None  # of a node; None: workers do not compete
    cores_per_worker: float = 1.0
    one_machine: bool = False
    update_s: float = 0.0  # the optimizer's time for one element
    split_s: float = 3e-4  # that splitting the backward of a micro-batch takes for each matrix
    overlap: float = (
        0.0  # share of the data-parallel communication that computing hides where it takes long enough
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """How many worker slots each node has; equal fleets have equal predicted times."""

    sizes: tuple[int, ...]  # descending
    most: int | None = None  # ranks that a plan may have

    @classmethod
    def of(cls, worker_slots: Sequence[WorkerSlot], most: int | None = None) -> Fleet:
        return cls(
            sizes=tuple(sorted(Counter(s.node for s in worker_slots).values(), reverse=True)), most=most
        )

    @property
    def workers(self) -> int:
        return sum(self.sizes)

    def room(self, block: int) -> int:
        """Ranks that there is room for in blocks of `block` ranks on a node."""
        blocks = sum(size // block for size in self.sizes)
        return block * (blocks if self.most is None else min(blocks, self.most // block))

    def together(self, block: int) -> int:
        """Ranks that are on one node at least, of the nodes that hold a block."""
        return min((size for size in self.sizes if size >= block), default=block)
