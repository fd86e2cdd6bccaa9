"""Write one writer's share of a checkpoint: its data files and the part manifest that describes them.

Takes bytes, knows no tensors library. Each piece goes from its own memory to the store; nothing is gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from elastic_train.checkpoint.checksums import content_hash, crc, digest, pages, running_hash
from elastic_train.checkpoint.manifest import Manifest, Row
from elastic_train.checkpoint.piece import Piece
from elastic_train.checkpoint.safetensors_layout import Layout, lay_out
from elastic_train.checkpoint.unchanged import Unchanged
from elastic_train.storage.store import Store

STABLE = "-stable.safetensors"
"""How the name of a file ends that holds what later checkpoints may refer to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenPart:
    """One writer's durable share: the part manifest's path inside the directory, its hash, and all bytes
    written.
    """

    writer: int
    manifest: str
    digest: str
    bytes: int


def write_part(
    store: Store,
    directory: str,
    writer: int,
    pieces: Sequence[Piece],
    *,
    unchanged: Unchanged | None = None,
    spend: Callable[[int], None] = lambda size: None,
) -> WrittenPart:
    """Write the pieces durably; after an error nothing of the part is visible.

    `spend` is called after each page with the number of bytes written, and may block to slow the writer.

    Pieces are read once, in the order of the file, and may be views of memory that must not change meanwhile.
    Those that are `unchanged` are read to hash them, and become references.
    """
    unchanged = unchanged or Unchanged()
    stem = f"w{writer:05d}"
    rows: list[Row] = []
    moving: list[Piece] = []
    stable: list[Piece] = []
    for piece in pieces:
        key = (piece.tensor, piece.state, piece.dtype, piece.shape, piece.box)
        known = unchanged.row(key, content_hash(piece.bytes())) if key in unchanged.rows else None
        if known is not None:
            rows.append(known)
        else:
            (stable if piece.tensor in unchanged.stable else moving).append(piece)
    written = 0
    for end, own in ((".safetensors", moving), (STABLE, stable)):
        if own or (own is moving and not stable):
            layout = lay_out(own, writer=writer)
            written += _write_file(store, f"{directory}/{stem}{end}", layout, rows, spend)
    table = Manifest.of(rows, url=f"{store.url}/{directory}").encode()
    store.write(f"{directory}/{stem}.parquet", table)
    return WrittenPart(
        writer=writer, manifest=f"{stem}.parquet", digest=digest(table), bytes=written + len(table)
    )


def _write_file(
    store: Store, path: str, layout: Layout, rows: list[Row], spend: Callable[[int], None]
) -> int:
    """Write one data file and add its rows; its bytes."""
    end = len(layout.head)
    with store.stream(path) as sink:
        sink.write(layout.head)
        for placed in layout.placed:
            piece, view = placed.piece, placed.piece.bytes()
            if placed.gap:
                sink.write(bytes(placed.gap))
            sums: list[int] = []
            content = running_hash()  # page by page, while the page is in the processor's cache
            for page in pages(view):
                sums.append(crc(page))
                content.update(page)
                sink.write(page)
                spend(len(page))
            end = placed.start + len(view)
            rows.append(
                Row(
                    tensor=piece.tensor,
                    state=piece.state,
                    dtype=piece.dtype,
                    shape=piece.shape,
                    box=piece.box,
                    file=path.rpartition("/")[2],
                    byte_offset=placed.start,
                    checksums=tuple(sums),
                    hash=content.digest(),
                    logical=piece.logical,
                )
            )
    return end
