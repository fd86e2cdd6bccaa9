"""Writing one writer's share of a checkpoint: a data file and the part manifest that describes it.

Takes bytes, knows no tensors library. Each piece goes from its own memory to the store; nothing is gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elastic_train.checkpoint.checksums import content_hash, crc, digest, pages
from elastic_train.checkpoint.manifest import Manifest, Row
from elastic_train.checkpoint.piece import Piece
from elastic_train.checkpoint.safetensors_layout import lay_out
from elastic_train.storage.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One writer's durable share: the part manifest's path inside the directory, its hash, and all bytes
    written.
    """

    writer: int
    manifest: str
    digest: str
    bytes: int


def write_part(store: Store, directory: str, writer: int, pieces: Sequence[Piece]) -> Part:
    """Write the pieces durably; after an error nothing of the part is visible.

    Pieces are read once, in the order of the file, and may be views of memory that must not change meanwhile.
    """
    stem = f"w{writer:05d}"
    layout = lay_out(pieces, writer=writer)
    rows: list[Row] = []
    end = len(layout.head)
    with store.stream(f"{directory}/{stem}.safetensors") as sink:
        sink.write(layout.head)
        for placed in layout.placed:
            piece, view = placed.piece, placed.piece.bytes()
            if placed.gap:
                sink.write(bytes(placed.gap))
            sums: list[int] = []
            for page in pages(view):
                sums.append(crc(page))
                sink.write(page)
            end = placed.start + len(view)
            rows.append(
                Row(
                    tensor=piece.tensor,
                    state=piece.state,
                    dtype=piece.dtype,
                    shape=piece.shape,
                    box=piece.box,
                    file=f"{stem}.safetensors",
                    byte_offset=placed.start,
                    checksums=tuple(sums),
                    hash=content_hash(view),
                    logical=piece.logical,
                )
            )
    table = Manifest.of(rows, url=f"{store.url}/{directory}").encode()
    store.write(f"{directory}/{stem}.parquet", table)
    return Part(writer=writer, manifest=f"{stem}.parquet", digest=digest(table), bytes=end + len(table))
