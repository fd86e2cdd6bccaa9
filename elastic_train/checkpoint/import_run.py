"""Import a checkpoint as the first one of a run, by reference or by copy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from elastic_train.checkpoint.commit import Assembled, assemble, describe
from elastic_train.checkpoint.document import Json, StateFile
from elastic_train.checkpoint.exporters.blocks import blocks
from elastic_train.checkpoint.foreign_proof import prove
from elastic_train.checkpoint.language.index import index
from elastic_train.checkpoint.language.mapped import Mapped
from elastic_train.checkpoint.language.operations import FLOATING
from elastic_train.checkpoint.language.parts import as_json, views_of
from elastic_train.checkpoint.language.translated_view import check_claims
from elastic_train.checkpoint.piece import Piece
from elastic_train.checkpoint.pins import pin
from elastic_train.checkpoint.reader import Checkpoint
from elastic_train.checkpoint.run_directory import RunDirectory, attempt_path
from elastic_train.checkpoint.writer import WrittenPart, write_part
from elastic_train.errors import ConfigError
from elastic_train.recovery.evidence import Stored
from elastic_train.storage.lease import Lease
from elastic_train.storage.store import Store

GENERATION = 0
"""No group wrote it; the run's own generations follow."""
PART = 256 << 20
"""Bytes of one file of a copy, which are in memory while it is written."""
LEASE_S = 10.0
OF_THE_OTHER_RUN = ("lineage", "metrics", "state_digest")
"""What a document says of the run that wrote it, under that run's names."""


def adopt(source: Mapped, store: Store, *, holder: str, copy: bool = False) -> Stored:
    """Commit `source` as the first checkpoint of the run at the root of `store`.

    With `copy` its files are compared with their own sums first: what is sealed was proved. Without, its
    bytes stay where they are, and are needed there: a run that owns them is made to keep them, or
    ConfigError. TensorMismatch where a specification computes some. What the specification says is equal is
    compared first.
    """
    run = RunDirectory(store)
    if run.ever_committed():
        raise ConfigError(
            field="RUN", problem=f"{store.url} has checkpoints already.", remedy="Choose a new run name."
        )
    check_claims(source)
    if not copy:
        _check_text(source)
    else:
        for part in source.parts:
            if isinstance(part, Checkpoint):
                prove(part.files, part.manifest)
    document = _completed(source)
    lease = Lease(store, holder=holder, lease_s=LEASE_S)
    lease.acquire()
    try:
        term = run.begin_term(holder)
        lease.renew(term)
        directory = attempt_path(step=document["step"], generation=GENERATION)
        # What an import left that ended before it committed, maybe of another source.
        store.delete_tree(directory)
        if copy:
            parts = list(_parts(source, store, directory))
            views = as_json(views_of(source.resolved))
            assembled = assemble(store, directory, parts, document, aliases=source.aliases, views=views)
        else:
            assembled = _pointing(source, store, directory, document)
        step = document["step"]
        return run.commit(assembled, term=term, generation=GENERATION, step=step, lineage=((GENERATION, 0),))
    finally:
        lease.release()


def _check_text(source: Mapped) -> None:
    """A manifest names files in UTF-8."""
    for part in source.parts:
        if isinstance(part, Checkpoint) and part.url.encode(errors="ignore").decode() != part.url:
            raise ConfigError(
                field="SOURCE",
                problem=f"{part.url!a} isn't UTF-8, so a manifest can't name its files.",
                remedy="Give the directory another name, or take its bytes along with --copy.",
            )


def _completed(source: Mapped) -> dict[str, Any]:
    """The document with a step; a checkpoint of weights alone begins a run, with all of them trainable."""
    document = {k: v for k, v in source.document.items() if k not in OF_THE_OTHER_RUN}
    if document.get("step") is None:
        document["step"] = 0
    if not document.get("trainable"):
        document["trainable"] = [
            tensor
            for (tensor, state), info in source.tensors.items()
            if state == "param" and info.dtype in FLOATING
        ]
    return document


def _pointing(source: Mapped, store: Store, directory: str, document: Mapping[str, Json]) -> Assembled:
    """A checkpoint whose manifest names the files of another system."""
    url = f"{store.url}/{directory}"
    parts = [part for part in source.parts if isinstance(part, Checkpoint)]
    assert len(parts) == len(source.parts)
    table = index(source.resolved, parts, url=url)
    views = as_json(views_of(source.resolved))
    said = StateFile(document=document, aliases=source.aliases, views=views)
    pin(table.distinct("file"), reader=store.url)
    roots = sorted({root for part in parts for root in part.files.places.all()})
    return describe(store, directory, [table], said, roots=roots)


def _parts(source: Mapped, store: Store, directory: str) -> Iterator[WrittenPart]:
    """The tensors in files of about PART bytes."""
    pieces: list[Piece] = []
    size, number = 0, 0
    for block in blocks(source, list(source.tensors)):
        info = source.tensors[block.name]
        if pieces and size + block.data.nbytes > PART:
            yield write_part(store, directory, number, pieces)
            pieces, size, number = [], 0, number + 1
        pieces.append(
            Piece(
                tensor=block.name[0],
                state=block.name[1],
                dtype=info.dtype,
                shape=info.shape,
                box=block.box,
                data=block.data,
            )
        )
        size += block.data.nbytes
    yield write_part(store, directory, number, pieces)
