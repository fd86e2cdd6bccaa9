"""Layout of a writer's safetensors files, decided before a byte is written.

The file is a valid safetensors file: eight bytes with the header's length, a JSON header padded with spaces,
the data without holes. Large pieces begin on memory pages; the gaps that this leaves are tensors of their
own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from elastic_train.checkpoint.dtypes import ELEMENTS
from elastic_train.checkpoint.piece import Piece
from elastic_train.errors import TensorMismatch

ALIGN = 4096
LARGE = 1 << 20
"""Pieces from this size on begin at a multiple of ALIGN in the file: at most 0.4 % of padding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A piece and where its bytes are: `start` in the file, after `gap` bytes of zeros."""

    piece: Piece
    gap: int
    start: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A whole file: `head` is everything before the data, `placed` the pieces in order."""

    head: bytes
    placed: tuple[Placed, ...]


def lay_out(pieces: Sequence[Piece], *, writer: int) -> Layout:
    """Large pieces first, then small ones by falling item size, so that all stay aligned to their items."""
    order = sorted(pieces, key=lambda p: (p.data_bytes < LARGE, -ELEMENTS[p.dtype].bytes, p.name))
    header: dict[str, object] = {
        "__metadata__": {"format": "elastic_train", "version": "1", "writer": str(writer)}
    }
    at, places = 0, []
    for piece in order:
        align = ALIGN if piece.data_bytes >= LARGE else ELEMENTS[piece.dtype].bytes
        gap = -at % align
        if gap:
            header[f"__gap__.{len(places)}"] = {"dtype": "U8", "shape": [gap], "data_offsets": [at, at + gap]}
            at += gap
        if piece.name in header:
            raise TensorMismatch(url=piece.name, problem="one writer was given the same box twice.")
        header[piece.name] = {
            "dtype": ELEMENTS[piece.dtype].code,
            "shape": list(piece.box.sizes),
            "data_offsets": [at, at + piece.data_bytes],
        }
        places.append((piece, gap, at))
        at += piece.data_bytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % ALIGN)
    head = len(text).to_bytes(8, "little") + text
    return Layout(
        head=head,
        placed=tuple(Placed(piece=p, gap=gap, start=len(head) + start) for p, gap, start in places),
    )
