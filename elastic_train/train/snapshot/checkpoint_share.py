"""This rank's share of a checkpoint, as views of live memory."""

from __future__ import annotations

from collections.abc import Sequence

from elastic_train.checkpoint.piece import Piece
from elastic_train.train.state.live_fragments import TensorPart, own_share, read_box


def share(held: Sequence[TensorPart]) -> list[Piece]:
    """Of everything that this rank holds, what it writes so that all replicas write equally much."""
    return [
        Piece(
            tensor=part.tensor,
            state=part.state,
            dtype=part.dtype,
            shape=part.shape,
            box=part.box,
            data=read_box(part, part.box),
        )
        for part in own_share(held)
    ]
