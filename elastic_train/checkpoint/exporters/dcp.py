"""Checkpoints of torch.distributed.checkpoint: `.metadata` and `.distcp` files, without torch.

`torch.distributed.checkpoint.load` reads them into `{"model": ..., "optimizer": ...}` as
`torch.distributed.checkpoint.state_dict` makes them. Tensors are cut into blocks of rows, so that a rank
reads little more than its part.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from elastic_train.checkpoint.account import Name
from elastic_train.checkpoint.document import encode
from elastic_train.checkpoint.exporters.blocks import BLOCK, RowBlock, blocks
from elastic_train.checkpoint.exporters.dcp_metadata import Grid, StoredPlace, metadata
from elastic_train.checkpoint.exporters.pickled import Tensor
from elastic_train.checkpoint.exporters.target import Exported, check_empty
from elastic_train.checkpoint.exporters.torch_state import (
    DOCUMENT,
    groups,
    named,
    scalar_bytes,
    scalars,
    tensor_bytes,
)
from elastic_train.checkpoint.exporters.torch_zip import write_torch
from elastic_train.checkpoint.language.mapped import Readable
from elastic_train.geometry.box import Box
from elastic_train.storage.store import Sink, Store

WRITERS = 2
Path = tuple[str | int, ...]


@dataclass(slots=True)
class _Written:
    """What the metadata must say of one file."""

    grids: dict[Path, list[StoredPlace]] = field(default_factory=dict)
    objects: dict[Path, StoredPlace] = field(default_factory=dict)
    bytes: int = 0


def export_dcp(
    source: Readable, store: Store, *, max_file_bytes: int = 4 << 30, limit: int = BLOCK
) -> Exported:
    """Write `source`, with its optimizer, to the root of `store`."""
    check_empty(store)
    paths = _paths(source)
    files = _files(source, list(paths), max_file_bytes)
    with ThreadPoolExecutor(WRITERS) as pool:
        jobs = [
            pool.submit(_write_tensors, source, store, file, {n: paths[n] for n in own}, limit)
            for file, own in files.items()
        ]
        parts = [job.result() for job in jobs]
    parts.append(_write_scalars(source, store, f"__0_{len(files)}.distcp"))
    grids: dict[Path, Grid] = {}
    for name, path in paths.items():
        info = source.tensors[name]
        places = [place for part in parts for place in part.grids.get(path, ())]
        grids[path] = Grid(dtype=info.dtype, shape=info.shape, places=tuple(places))
    for alias, target in source.aliases.items():
        if (target, "param") in paths:
            grids["model", alias] = grids["model", target]
    for part in parts:
        for path, places in part.grids.items():
            if path not in grids:
                (place,) = places
                grids[path] = Grid(dtype=place.dtype, shape=(), places=(place,))
    objects = {path: place for part in parts for path, place in part.objects.items()}
    data = metadata(grids, objects)
    store.write(".metadata", data)
    total = sum(part.bytes for part in parts) + len(data)
    return Exported(files=(*files, f"__0_{len(files)}.distcp", ".metadata"), bytes=total)


def _paths(source: Readable) -> dict[Name, Path]:
    """Where each tensor is in the nested state dict."""
    found: dict[Name, Path] = {}
    kinds = named(source)
    for tensor in kinds.params:
        found[tensor, "param"] = ("model", tensor)
    for tensor in kinds.buffers:
        found[tensor, "buffer"] = ("model", tensor)
    for tensor, state in kinds.states:
        found[tensor, state] = ("optimizer", "state", tensor, state)
    return found


def _files(source: Readable, names: list[Name], most: int) -> dict[str, list[Name]]:
    found: list[list[Name]] = [[]]
    full = 0
    for name in names:
        size = tensor_bytes(source, name)
        if found[-1] and full + size > most:
            found.append([])
            full = 0
        found[-1].append(name)
        full += size
    return {f"__0_{i}.distcp": own for i, own in enumerate(found)}


def _write_tensors(
    source: Readable, store: Store, file: str, paths: Mapping[Name, Path], limit: int
) -> _Written:
    written = _Written()
    with store.stream(file) as sink:
        for block in blocks(source, list(paths), limit=limit):
            dtype = source.tensors[block.name].dtype
            place = _write_block(sink, file, written.bytes, block, dtype)
            written.grids.setdefault(paths[block.name], []).append(place)
            written.bytes += place.length
    return written


def _write_block(sink: Sink, file: str, start: int, block: RowBlock, dtype: str) -> StoredPlace:
    view = block.bytes
    tree = Tensor("0", dtype, block.box.sizes)
    length = write_torch(sink.write, tree, {"0": (len(view), [view])})
    return StoredPlace(box=block.box, dtype=dtype, file=file, start=start, length=length)


def _write_scalars(source: Readable, store: Store, file: str) -> _Written:
    """The optimizer's numbers, its groups, the step and the document."""
    written = _Written()
    with store.stream(file) as sink:
        for tensor, state, value, dtype in scalars(source.document):
            path: Path = ("optimizer", "state", tensor, state)
            if dtype is None:
                _write_object(sink, file, written, path, value)
                continue
            data = scalar_bytes(value, dtype)
            length = write_torch(sink.write, Tensor("0", dtype, ()), {"0": (len(data), [data])})
            place = StoredPlace(box=Box((), ()), dtype=dtype, file=file, start=written.bytes, length=length)
            written.grids[path] = [place]
            written.bytes += length
        for number, group in enumerate(groups(source.document)):
            for key, value in group.items():
                _write_object(sink, file, written, ("optimizer", "param_groups", number, key), value)
        if isinstance(source.document.get("step"), int):
            _write_object(sink, file, written, ("step",), source.document["step"])
        document = {"document": source.document, "buffers": list(named(source).buffers)}
        _write_object(sink, file, written, (DOCUMENT,), encode(document).decode())
    return written


def _write_object(sink: Sink, file: str, written: _Written, path: Path, value: Any) -> None:
    length = write_torch(sink.write, value, {})
    written.objects[path] = StoredPlace(
        box=Box((), ()), dtype="", file=file, start=written.bytes, length=length
    )
    written.bytes += length
