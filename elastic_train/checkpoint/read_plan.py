"""What the ranks of a plan would read of a checkpoint, and the memory that takes; nothing is read."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_train.checkpoint.dtypes import ELEMENTS
from elastic_train.checkpoint.fetch import THREADS
from elastic_train.checkpoint.ranges import MOST, Index, Request
from elastic_train.checkpoint.reader import Checkpoint
from elastic_train.checkpoint.resharding import box_of
from elastic_train.geometry.box import Box
from elastic_train.geometry.layout import Sharded, boxes


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReads:
    """Bytes of state that a rank holds, bytes and ranges that it reads, and memory that it needs at most."""

    rank: int
    state_bytes: int
    read_bytes: int
    reads: int
    peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPlan:
    """`amplification` is the bytes that leave storage over the bytes of the state."""

    ranks: tuple[RankReads, ...]
    amplification: float


def read_plan(checkpoint: Checkpoint, *, dp_shard: int) -> ReadPlan:
    """Parameters sharded along dim 0 and the optimizer's states with them, each by its kind; the rest is read
    by rank 0 and passed on. TensorMismatch where a state can't be cut like this.

    Replicas read nothing of their own: each byte leaves storage once.
    """
    kinds = checkpoint.kinds()
    index = Index(checkpoint.manifest, url=checkpoint.url)
    ranks: list[RankReads] = []
    total = 0
    for rank in range(dp_shard):
        requests: list[Request] = []
        held = 0
        for (tensor, state), info in checkpoint.tensors.items():
            item = ELEMENTS[info.dtype].bytes
            parameter = checkpoint.tensors.get((tensor, "param"), info)
            whole = not parameter.shape or state == "buffer"
            own = (Box.whole(info.shape),)
            if not whole:
                own = boxes(parameter.shape, (dp_shard,), (rank,), (Sharded(0),))
                own = tuple(
                    box_of((tensor, state), box, checkpoint.tensors, kinds, url=checkpoint.url) for box in own
                )
            held += sum(box.numel for box in own) * item
            if not whole or rank == 0:
                requests += [(tensor, state, box) for box in own]
        reads = index.reads(requests)
        read = sum(r.length for r in reads)
        total += sum(box.numel * ELEMENTS[checkpoint.tensors[t, s].dtype].bytes for t, s, box in requests)
        ranks.append(
            RankReads(
                rank=rank,
                state_bytes=held,
                read_bytes=read,
                reads=len(reads),
                peak_bytes=held + min(read, THREADS * MOST),
            )
        )
    return ReadPlan(
        ranks=tuple(ranks), amplification=sum(r.read_bytes for r in ranks) / total if total else 1.0
    )
