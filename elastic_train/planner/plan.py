"""The plan: a mesh over ranks, stages, micro-batch quotas, and the placement of ranks on workers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from elastic_train.axes import AXES, BATCH, RANKED

Recompute = Literal["none", "selective", "full"]
"""What backward computes again instead of keeping it: nothing, attention's inside, whole layers."""

Schedule = Literal["1F1B", "ZeroBubble", "Interleaved1F1B"]
"""Order of forwards and backwards over the stages: one forward, one backward; with the gradients of weights
apart, where a stage would wait (ZB-H1); with several stages on each pp index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Sizes of the axes in rank order. `ep` is the inner part of dp_shard: no factor of `size`."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    @property
    def size(self) -> int:
        return math.prod(getattr(self, axis) for axis in RANKED)

    @property
    def dp(self) -> int:
        """Ranks that consume different micro-batches."""
        return math.prod(getattr(self, axis) for axis in BATCH)

    @property
    def shards(self) -> int:
        """Ranks among which tensors are sharded: those of cp too, where dp_shard shards any."""
        return self.dp_shard * self.cp if self.dp_shard > 1 else 1

    @property
    def copies(self) -> int:
        """Ranks of a stage that hold the same part of its state."""
        return self.size // (self.pp * self.shards * self.tp)

    @property
    def copy_size(self) -> int:
        """Ranks of a stage that hold one copy of its state among them, next to each other in rank order."""
        return self.size // (self.pp * self.dp_replicate)

    @property
    def block_size(self) -> int:
        """Ranks of a stage that compute the same micro-batches together, next to each other in rank order."""
        return self.size // (self.pp * self.dp)

    def coordinate(self, rank: int) -> dict[str, int]:
        """Axis name -> position of a rank."""
        position: dict[str, int] = {}
        for axis in reversed(RANKED):
            rank, position[axis] = divmod(rank, getattr(self, axis))
        return position

    def copy_index(self, rank: int) -> int:
        """Which of the copies of its part a rank holds, 0 .. copies - 1."""
        at = self.coordinate(rank)
        return at["dp_replicate"] if self.dp_shard > 1 else at["dp_replicate"] * self.cp + at["cp"]

    def dp_index(self, rank: int) -> int:
        """Which share of the micro-batches a rank consumes, 0 .. dp - 1."""
        at = self.coordinate(rank)
        return at["dp_replicate"] * self.dp_shard + at["dp_shard"]

    def __str__(self) -> str:
        named = [f"{axis} {getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1]
        return " x ".join(named) or "dp 1"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSlot:
    """A worker that may take a rank, its node and the node's failure domain.

    `speed` is relative: a worker of speed 0.5 takes twice the time.
    """

    worker: str
    node: str
    domain: str = ""
    speed: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One way to run the training problem on given workers.

    `workers[rank]` is the worker that takes a rank and `nodes[rank]` its node. `shares[i]` are the indices of
    the micro-batches (0 .. M - 1) that data-parallel index i computes, ascending; together they partition
    0 .. M - 1, and shares may be uneven.

    With pp > 1, `stages` are half-open ranges of the model's blocks by stage, in the order of the model, and
    tile them. Stage s is on pp index s % pp, `virtual` stages on each. What comes before the blocks is on the
    first stage, what comes after on the last; a stage may consist of that alone. With `sequence_parallel`, tp
    divides what is outside of projections by positions. Adjacent stages that are
    replayed together, so that nothing between them is logged, are in one of `groups`; () where none is.
    """

    mesh: Mesh
    workers: tuple[str, ...]
    nodes: tuple[str, ...]
    shares: tuple[tuple[int, ...], ...]
    stages: tuple[tuple[int, int], ...] = ()
    virtual: int = 1
    schedule: Schedule = "1F1B"
    recompute: Recompute = "none"
    sequence_parallel: bool = False
    groups: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        assert len(self.workers) == len(self.nodes) == self.mesh.size
        assert len(self.shares) == self.mesh.dp
        assert self.mesh.dp_shard % self.mesh.ep == 0
        assert len(self.stages) in (0, self.mesh.pp * self.virtual)
        assert self.schedule != "ZeroBubble" or (self.mesh.dp_shard == 1 and self.recompute == "none")
        assert all(a[1] == b[0] for a, b in zip(self.stages, self.stages[1:], strict=False))
        assert not self.groups or (self.groups[0][0], self.groups[-1][1]) == (0, self.mesh.pp)

    @property
    def world_size(self) -> int:
        return self.mesh.size

    @property
    def rounds(self) -> int:
        """Micro-batches that every rank runs per step; shorter shares are filled with zero-weight work."""
        return max(len(s) for s in self.shares)

    def group_of(self, stage: int) -> tuple[int, int]:
        """The stages that are replayed together with one, as a half-open range."""
        return next((group for group in self.groups if group[0] <= stage < group[1]), (stage, stage + 1))

    def stages_of(self, pp: int) -> tuple[tuple[int, int], ...]:
        """The ranges of blocks on a pp index."""
        return self.stages[pp :: self.mesh.pp]

    def __str__(self) -> str:
        together = ", ".join(f"{a} to {b - 1}" for a, b in self.groups if b - a > 1)
        said = f", stages {together} replayed together" if together else ""
        return f"{self.mesh} {on_nodes(len(set(self.nodes)))}{said}"


def counted(number: int, noun: str, verb: tuple[str, str] | None = None) -> str:
    """So many of something, for people, and what it does: `verb` is its form for one and for more."""
    said = f"{number:,} {noun}{'' if number == 1 else 's'}"
    return f"{said} {verb[number != 1]}" if verb else said


def on_nodes(count: int) -> str:
    """Where a plan is, for people."""
    return f"on {counted(count, 'node')}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Infeasible:
    """No plan: why, and the nearest thing that would work."""

    reason: str


def even_shares(micro_batches: int, dp: int) -> tuple[tuple[int, ...], ...]:
    """Contiguous shares of 0 .. micro_batches - 1, the first ones longer by one where it doesn't divide."""
    size, longer = divmod(micro_batches, dp)
    shares: list[tuple[int, ...]] = []
    start = 0
    for i in range(dp):
        stop = start + size + (i < longer)
        shares.append(tuple(range(start, stop)))
        start = stop
    return tuple(shares)


def bytes_text(n: float) -> str:
    """A byte count a person can read."""
    exponent = min(int(math.log(n, 1024)), 4) if n >= 1 else 0
    return f"{n / 1024**exponent:.1f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[exponent]}"
