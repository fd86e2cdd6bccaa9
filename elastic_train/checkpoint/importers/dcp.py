"""Checkpoints of torch.distributed.checkpoint (`.metadata` and `.distcp` files), indexed where they lie.

Each block of a tensor is a file of `torch.save` inside a `.distcp` file. Blocks whose first bytes are equal
up to the data have their data at the same place, so that only one of each kind is parsed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from elastic_train.checkpoint.document import decode as decode_json
from elastic_train.checkpoint.importers.dcp_document import document_of, tell_numbers
from elastic_train.checkpoint.importers.dcp_metadata import Block, Grid, Metadata, decode
from elastic_train.checkpoint.importers.dcp_names import Names, named
from elastic_train.checkpoint.importers.foreign_document import plain
from elastic_train.checkpoint.importers.full_optimizer import Parameters
from elastic_train.checkpoint.importers.imported import Imported, imported
from elastic_train.checkpoint.importers.pickle_free import TensorRef
from elastic_train.checkpoint.importers.torch_file import byte_strides, check_readable, open_file
from elastic_train.checkpoint.importers.trainer_state import beside_weights
from elastic_train.checkpoint.importers.windows import Item, Window, windows
from elastic_train.checkpoint.manifest import Row
from elastic_train.checkpoint.piece import span
from elastic_train.errors import ChecksumMismatch, FormatUnsupported
from elastic_train.storage.fsspec_store import Options
from elastic_train.storage.store import Store

METADATA = ".metadata"
DOCUMENT = "elastic_train"
"""The key under which our own exporter keeps the whole document."""


def open_dcp(
    store: Store,
    at: str,
    options: Options | None = None,
    *,
    names: Sequence[str] | None = None,
    parts: Sequence[str] = ("",),
) -> Imported:
    """Index the directory `at` of the store. With `parts`, directories in it are one checkpoint."""
    metadata = _joined(store, at, parts)
    found = named(metadata, url=f"{store.url}/{at}")
    items = {
        f"{key} {n}": b.item for key, grid in metadata.tensors.items() for n, b in enumerate(grid.blocks)
    }
    opened = windows(store, items | dict(metadata.objects))
    values, lost = _values({key: opened[key] for key in metadata.objects})
    own = values.pop(DOCUMENT, None)
    reported = tell_numbers(found, metadata, values, names)
    keys = reported.names
    places = StoredPlaces()
    rows: list[Row] = []
    scalars: dict[str, tuple[str, Any]] = {}
    aliases = _aliases(metadata, keys)
    for key, grid in metadata.tensors.items():
        name = keys.tensors.get(key)
        if name is not None and name.tensor in aliases:
            continue
        setting = key in keys.hyperparameters
        if name is None and (not (setting or key in keys.beside) or grid.shape):
            if setting:
                lost.append(f"{key}: a setting that is a tensor of {list(grid.shape)}")
            continue
        where = [places.find(opened[f"{key} {n}"], key, grid, block) for n, block in enumerate(grid.blocks)]
        if setting and where:
            values[key] = _scalar(opened[f"{key} 0"])
        elif not grid.shape and where and (name is None or name.optimizer):
            scalars[key] = (grid.dtype, _scalar(opened[f"{key} 0"]))
        elif name is not None:
            rows += rows_of(key, grid, where, name.tensor, name.state, at)
    if isinstance(own, str):
        kept = decode_json(own.encode(), url=f"{store.url}/{at}")
        rows = [_as_buffer(row, set(kept["buffers"])) for row in rows]
        return imported(store, at, rows, kept["document"], aliases=aliases, options=options)
    lost += reported.lost
    lost += [
        f"{key}: a tensor of {grid.dtype} {list(grid.shape)} that is neither the model's nor the optimizer's"
        for key, grid in metadata.tensors.items()
        if key in keys.beside and key not in scalars
    ]
    beside = None
    if parts != ("",):
        nothing = Parameters(shapes={})
        there = [n for n in store.names(at) if not n.startswith("optimizer")]
        beside = beside_weights(store, at, there, nothing, {})
        lost += beside.lost
    step = beside.step if beside is not None else None
    document = document_of(keys, scalars, values, lost, aliases, reported.assumed, step)
    if beside is not None:
        document["foreign"] |= beside.facts
    return imported(store, at, rows, document, aliases=aliases, options=options)


def _joined(store: Store, at: str, parts: Sequence[str]) -> Metadata:
    """The metadata of all parts; FormatUnsupported where two say the same key."""
    tensors: dict[str, Grid] = {}
    objects: dict[str, Item] = {}
    paths: dict[str, tuple[str | int, ...]] = {}
    for part in parts:
        directory = "/".join(p for p in (at, part) if p)
        path = f"{directory}/{METADATA}" if directory else METADATA
        url = f"{store.url}/{path}"
        found = decode(store.read(path), at=directory, url=url)
        if found.folded:
            raise FormatUnsupported(
                url=url,
                problem=f"{min(found.folded)} is stored in a shape of Megatron's, and the file metadata.json "
                "that would say so is gone. Copy it again.",
            )
        if twice := (tensors.keys() | objects.keys()) & (found.tensors.keys() | found.objects.keys()):
            raise FormatUnsupported(url=url, problem=f"{min(twice)} is in two of {', '.join(parts)}.")
        tensors |= found.tensors
        objects |= found.objects
        paths |= found.paths
    return Metadata(tensors=tensors, objects=objects, paths=paths, folded={})


def _aliases(metadata: Metadata, names: Names) -> dict[str, str]:
    """Parameters whose bytes are all those of another: they were tied."""
    first: dict[tuple[Block, ...], str] = {}
    found: dict[str, str] = {}
    for key, grid in metadata.tensors.items():
        name = names.tensors.get(key)
        if name is not None and name.state == "param" and grid.blocks:
            owner = first.setdefault(grid.blocks, name.tensor)
            if owner != name.tensor:
                found[name.tensor] = owner
    return found


def _as_buffer(row: Row, buffers: set[str]) -> Row:
    return replace(row, state="buffer") if row.state == "param" and row.tensor in buffers else row


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPlace:
    """Where in an item the data of a block is, and how its elements follow one another."""

    start: int
    strides: tuple[int, ...] | None


class StoredPlaces:
    """Finds the data in items and remembers the kinds of items that it has seen."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, tuple[int, ...], str], list[tuple[bytes, BlockPlace]]] = {}

    def find(self, window: Window, key: str, grid: Grid, block: Block) -> BlockPlace:
        kind = (window.item.length, block.box.sizes, grid.dtype)
        for head, place in self._seen.get(kind, ()):
            if window.head.startswith(head):
                return place
        place = _parse(window, key, grid, block)
        if place.start <= len(window.head):
            self._seen.setdefault(kind, []).append((window.head[: place.start], place))
        return place


def _parse(window: Window, key: str, grid: Grid, block: Block) -> BlockPlace:
    file = open_file(window.as_store(), window.item.file)
    ref = file.tree
    url = f"{window.url}/{window.item.file}"
    check_readable(ref, key, url=url)
    if not isinstance(ref, TensorRef):
        raise FormatUnsupported(
            url=url, problem=f"{key} is stored as a {type(ref).__name__}, not as a tensor."
        )
    if (ref.dtype, ref.shape) != (grid.dtype, block.box.sizes):
        raise ChecksumMismatch(
            url=url,
            problem=f"{key} {span(block.box)} is {ref.dtype} {ref.shape} there, and {grid.dtype} in the "
            "metadata. The files are of two checkpoints: copy it again.",
        )
    return BlockPlace(start=file.place(ref), strides=byte_strides(ref))


def rows_of(
    key: str, grid: Grid, places: list[BlockPlace], tensor: str, state: str, at: str
) -> Iterator[Row]:
    for block, place in zip(grid.blocks, places, strict=True):
        yield Row(
            tensor=tensor,
            state=state,
            dtype=grid.dtype,
            shape=grid.shape,
            box=block.box,
            file=block.item.file.removeprefix(f"{at}/") if at else block.item.file,
            byte_offset=block.item.start + place.start,
            byte_strides=place.strides,
        )


def _scalar(window: Window) -> Any:
    file = open_file(window.as_store(), window.item.file)
    return file.scalar(file.tree)


def _values(objects: Mapping[str, Window]) -> tuple[dict[str, Any], list[str]]:
    """What was stored as a Python object, as far as it is numbers and text, and what of it can't be had."""
    values: dict[str, Any] = {}
    unread: list[str] = []
    for key, window in objects.items():
        try:
            value, lost = plain(open_file(window.as_store(), window.item.file).tree, key)
        except FormatUnsupported as error:
            unread.append(f"{key}: {error.problem}")
            continue
        unread += lost
        if not lost:
            values[key] = value
    return values, unread
