"""Forecast what the ranks of a plan would read of a checkpoint, and the memory it takes."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from elastic_train.checkpoint.dtypes import ELEMENTS
from elastic_train.checkpoint.fetch import THREADS
from elastic_train.checkpoint.ranges import MOST, RangeIndex, Request
from elastic_train.checkpoint.read_volume import ReadVolume
from elastic_train.checkpoint.reader import Checkpoint
from elastic_train.checkpoint.resharding import box_of
from elastic_train.errors import TensorMismatch
from elastic_train.geometry.box import Box
from elastic_train.geometry.layout import Sharded, boxes

MOST_REPORTED = 8
"""Problems that one message lists."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadShare:
    """A rank's boxes of a parameter. Of several ranks that hold the same one `reads` it and passes it on."""

    tensor: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    reads: bool


def sharded(checkpoint: Checkpoint, dp_shard: int) -> tuple[tuple[ReadShare, ...], ...]:
    """By rank: parameters cut along dim 0, and what can't be cut on all of them."""
    shapes = {tensor: info.shape for (tensor, state), info in checkpoint.tensors.items() if state == "param"}
    return tuple(
        tuple(
            ReadShare(
                tensor=tensor,
                shape=shape,
                boxes=boxes(shape, (dp_shard,), (rank,), (Sharded(0),)) if shape else (Box.whole(shape),),
                reads=rank == 0 or bool(shape),
            )
            for tensor, shape in shapes.items()
        )
        for rank in range(dp_shard)
    )


def read_plan(checkpoint: Checkpoint, ranks: Sequence[Sequence[ReadShare]]) -> ReadPlan:
    """Optimizer states go with their parameters, each by its kind; buffers are read by rank 0 and passed
    on. TensorMismatch where a state can't be cut like this, or the parameters aren't those of the checkpoint.
    """
    _check(checkpoint, ranks)
    kinds = checkpoint.kinds()
    volume = ReadVolume(RangeIndex(checkpoint.manifest, url=checkpoint.url))
    found: list[RankReads] = []
    total = 0
    for rank, held in enumerate(ranks):
        by_tensor = {checkpoint.aliases.get(own.tensor, own.tensor): own for own in held}
        requests: list[Request] = []
        size = 0
        for (tensor, state), info in checkpoint.tensors.items():
            own = by_tensor.get(tensor)
            parts: Sequence[Box] = (Box.whole(info.shape),)
            if (tensor, "param") in checkpoint.tensors:
                wanted = own.boxes if own is not None else ()
                name = (tensor, state)
                # Boxes of one parameter may share a part of a state.
                parts = tuple(
                    dict.fromkeys(
                        box_of(name, box, checkpoint.tensors, kinds, url=checkpoint.url) for box in wanted
                    )
                )
            size += sum(box.numel for box in parts) * ELEMENTS[info.dtype].bytes
            if own.reads if own is not None else rank == 0:
                requests += [(tensor, state, box) for box in parts]
        read, reads = volume.of(requests)
        total += sum(box.numel * ELEMENTS[checkpoint.tensors[t, s].dtype].bytes for t, s, box in requests)
        found.append(
            RankReads(
                rank=rank,
                state_bytes=size,
                read_bytes=read,
                reads=reads,
                peak_bytes=size + min(read, THREADS * MOST),
            )
        )
    return ReadPlan(
        ranks=tuple(found), amplification=sum(r.read_bytes for r in found) / total if total else 1.0
    )


def _check(checkpoint: Checkpoint, ranks: Sequence[Sequence[ReadShare]]) -> None:
    stored = {tensor: info.shape for (tensor, state), info in checkpoint.tensors.items() if state == "param"}
    wanted = {checkpoint.aliases.get(h.tensor, h.tensor): h.shape for held in ranks for h in held}
    problems = [
        f"{t} is not in the checkpoint{_near(t, stored)}" for t in sorted(wanted.keys() - stored.keys())
    ]
    problems += [f"{t} is not in the model{_near(t, wanted)}" for t in sorted(stored.keys() - wanted.keys())]
    problems += [
        f"{t} is {list(stored[t])} in the checkpoint and {list(wanted[t])} in the model"
        for t in sorted(stored.keys() & wanted.keys())
        if stored[t] != wanted[t]
    ]
    if problems:
        more = f"; and {len(problems) - MOST_REPORTED} more" if len(problems) > MOST_REPORTED else ""
        raise TensorMismatch(url=checkpoint.url, problem=f"{'; '.join(problems[:MOST_REPORTED])}{more}.")


def _near(name: str, others: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(others), n=1)
    return f" (did you mean {near[0]}?)" if near else ""
