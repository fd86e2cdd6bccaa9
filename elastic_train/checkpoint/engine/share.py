"""One rank's part of a snapshot, on its way to other tiers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from elastic_train.checkpoint.piece import Piece


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Share:
    """`storage`: a checkpoint was asked for, so it belongs in storage too.

    `replica` (i of n) says which part of what its replicas hold too these pieces are. The pieces' bytes are
    in a slot of an arena, each at its offset, and stay as they are until `release`; `stamp` proves it to
    other processes. Pieces that view live memory have no slot.
    """

    generation: int
    rank: int
    step: int
    pieces: tuple[Piece, ...]
    document: Mapping[str, Any]
    storage: bool = True
    replica: tuple[int, int] = (0, 1)
    slot: int = -1
    stamp: int = 0
    offsets: tuple[int, ...] = ()
    seconds: float = 0.0  # that copying took
    release: Callable[[], None] = lambda: None
