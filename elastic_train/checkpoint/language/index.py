"""A map as a manifest: rows that point at the bytes where they lie, so that importing is indexing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import pyarrow as pa

from elastic_train.checkpoint.account import Name
from elastic_train.checkpoint.dtypes import ELEMENTS
from elastic_train.checkpoint.language.resolve import Resolved
from elastic_train.checkpoint.language.virtual import Origin, Tile, Virtual, source_box
from elastic_train.checkpoint.manifest import Manifest, Row
from elastic_train.checkpoint.ranges import RangeIndex, strides_of
from elastic_train.checkpoint.reader import Checkpoint
from elastic_train.errors import TensorMismatch
from elastic_train.geometry.box import Box


def index(resolved: Resolved, parts: Sequence[Checkpoint], *, url: str) -> Manifest:
    """The manifest of the mapped tensors; `file` is absolute in every row.

    TensorMismatch for what has no bytes: casts, means, padding.
    """
    whole: list[dict[Name, Name]] = [{} for _ in parts]
    rows: list[Row] = []
    indices = [RangeIndex(p.manifest, url=p.url) for p in parts]
    for name, virtual in resolved.tensors.items():
        at = _same(virtual, parts)
        if at is not None and (at.tensor, at.state) not in whole[at.parts[0]]:
            whole[at.parts[0]][at.tensor, at.state] = name
        else:
            rows += _rows(name, virtual, parts, indices, url)
    tables = [_renamed(p, names) for p, names in zip(parts, whole, strict=True) if names]
    return Manifest.concat([*tables, Manifest.of(rows, url=url)], url=url, extra={})


def _same(virtual: Virtual, parts: Sequence[Checkpoint]) -> Origin | None:
    """The source of a tensor that is all of a stored one, under another name."""
    if virtual.casts or len(virtual.tiles) != 1:
        return None
    (tile,) = virtual.tiles
    at = tile.source
    if at is None or len(at.parts) != 1 or any(at.origin) or at.axes != tuple(range(len(at.origin))):
        return None
    part, *_ = at.parts
    return at if parts[part].tensors[at.tensor, at.state].shape == virtual.shape else None


def _renamed(part: Checkpoint, names: Mapping[Name, Name]) -> Manifest:
    """The rows of whole tensors under their new names, without an object per row."""
    table = part.manifest.table
    stored = part.manifest.fragments.names
    new = [names.get(old, old) for old in stored]
    used = pa.array([old in names for old in stored])
    key = pa.array(part.manifest.fragments.key)
    encoded = pa.concat_arrays(table.column("file").chunks).dictionary_encode()
    absolute = pa.DictionaryArray.from_arrays(
        encoded.indices, pa.array([part.files.absolute(f) for f in encoded.dictionary.to_pylist()])
    )
    for place, values in (
        ("tensor", pa.array([n[0] for n in new]).take(key)),
        ("state", pa.array([n[1] for n in new]).take(key)),
        ("file", absolute.cast(pa.string())),
    ):
        number = table.schema.get_field_index(place)
        table = table.set_column(number, table.schema.field(number), values)
    return Manifest.from_table(table.filter(used.take(key)), url=part.url)


def _rows(
    name: Name, virtual: Virtual, parts: Sequence[Checkpoint], indices: Sequence[RangeIndex], url: str
) -> Iterator[Row]:
    if virtual.casts:
        raise _lazy(name, f"it is cast to {virtual.casts[-1]}", url)
    for tile in virtual.tiles:
        if tile.source is None:
            raise _lazy(name, "it is padded", url)
        part, *others = tile.source.parts
        if others:
            raise _lazy(name, "it is a mean", url)
        yield from _tile_rows(name, virtual, tile, tile.source, parts[part], indices[part])


def _tile_rows(
    name: Name, virtual: Virtual, tile: Tile, at: Origin, part: Checkpoint, rows: RangeIndex
) -> Iterator[Row]:
    wanted = source_box(at, tile.box, tile.box)
    item = ELEMENTS[virtual.stored].bytes
    places = rows.parts(at.tensor, at.state, wanted)
    for (_, inner), row in zip(places, part.manifest.rows([i for i, _ in places]), strict=True):
        strides = strides_of(row, item)
        offsets: list[int] = []
        for dim, axis in enumerate(at.axes):
            first = 0 if axis is None else row.box.offsets[axis] + inner.offsets[axis] - wanted.offsets[axis]
            offsets.append(tile.box.offsets[dim] + first)
        sizes = tuple(1 if axis is None else inner.sizes[axis] for axis in at.axes)
        kept = inner.sizes == row.box.sizes and at.axes == tuple(range(len(wanted.sizes)))
        turned = tuple(item if axis is None else strides[axis] for axis in at.axes)
        yield Row(
            tensor=name[0],
            state=name[1],
            dtype=virtual.stored,
            shape=virtual.shape,
            box=Box(tuple(offsets), sizes),
            file=part.files.absolute(row.file),
            byte_offset=row.byte_offset + sum(o * s for o, s in zip(inner.offsets, strides, strict=True)),
            byte_strides=row.byte_strides if kept else turned,
            checksums=row.checksums if kept else None,
            hash=row.hash if kept else None,
        )


def _lazy(name: Name, why: str, url: str) -> TensorMismatch:
    return TensorMismatch(
        url=url, problem=f"{name[0]} ({name[1]}) can't be read in place: {why}. Copy it instead."
    )
