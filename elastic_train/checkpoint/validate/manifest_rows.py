"""Validate the rows of a manifest: boxes in their tensors, byte ranges in bounds, a checksum per page."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from elastic_train.checkpoint.checksums import LARGEST, MOST_PAGES, SMALLEST
from elastic_train.errors import Malformed, TensorMismatch
from elastic_train.geometry.fragments import ITEM_BYTES, Fragments

Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
_Refuse = Callable[[Mask, str], None]

MOST_DIMS = 32
"""Dims of a tensor; numpy, torch and what reads their files have no more than 64."""
END = (1 << 63) - 1
FREE_BYTES = 256 << 20
EXPANSION = 64
"""Bytes of all tensors over those that they are made of, where strides repeat elements."""
TEXTS = ("tensor", "state", "dtype", "file")
BOXES = ("shape", "offsets", "sizes")
FROM_WHOM = "Use an older checkpoint, or copy this one again from where it was."


def malformed(url: str, what: str) -> Malformed:
    return Malformed(url=url, problem=f"{what}. {FROM_WHOM}")


def check_columns(table: pa.Table, *, url: str) -> None:
    """Nothing absent that has to be there, text that is text, no more dims than a tensor can have."""
    for name in (*TEXTS, *BOXES, "byte_offset"):
        if table.column(name).null_count:
            raise malformed(url, f"a row of its manifest has no {name}")
    for name in (*BOXES, "byte_strides", "checksums"):
        column = table.column(name)
        if any(chunk.flatten().null_count for chunk in column.chunks):
            raise malformed(url, f"a row of its manifest has a hole in its {name}")
        longest = pc.call_function("max", [pc.call_function("list_value_length", [column])]).as_py()
        if name != "checksums" and (longest or 0) > MOST_DIMS:
            raise malformed(url, f"a row of its manifest has {longest} dims in its {name}")
    for name in TEXTS:
        for text in table.column(name).unique().to_pylist():
            if not text or "\0" in text:
                raise malformed(url, f"a row of its manifest has {text!r} as its {name}")


def check_shape(name: tuple[str, str], dtype: str, shape: tuple[int, ...], *, url: str) -> None:
    """A shape that an array can have: its bytes, without the dims of size 0, fit into 63 bits."""
    most = math.prod(max(size, 1) for size in shape) * ITEM_BYTES[dtype] if len(shape) <= MOST_DIMS else END
    if min(shape, default=0) < 0 or most >= END:
        raise malformed(url, f"{named(name)} has a shape that no tensor has, {_short(shape)}")


def check_rows(table: pa.Table, fragments: Fragments, *, url: str) -> None:
    """Boxes inside their tensors, byte ranges in bounds, pages and checksums complete."""
    for name, dtype, shape in zip(fragments.names, fragments.dtypes, fragments.shapes, strict=True):
        check_shape(name, dtype, shape, url=url)
    if not len(fragments):
        return

    def refuse(bad: Mask, what: str) -> None:
        if bad.any():
            row = int(np.argmax(bad))
            name = fragments.names[int(fragments.key[row])]
            raise malformed(url, f"row {row} of its manifest, of {named(name)}, {what}")

    dims = fragments.offsets.shape[1]
    shapes = np.ones((len(fragments.names), dims), dtype=np.int64)
    for number, shape in enumerate(fragments.shapes):
        shapes[number, : len(shape)] = shape
    room = shapes[fragments.key] - fragments.offsets
    outside = (fragments.offsets < 0) | (fragments.sizes < 0) | (room < 0) | (fragments.sizes > room)
    refuse(np.asarray(outside.any(axis=1)), "has a box outside of its tensor")
    at: Ints = table.column("byte_offset").to_numpy()
    refuse(at < 0, "begins before its file does")
    span = _spans(table, fragments, refuse)
    refuse(at > END - span, "ends behind any file")
    made, lies = float(np.sum(fragments.nbytes, dtype=np.float64)), float(np.sum(span, dtype=np.float64))
    if made > FREE_BYTES + EXPANSION * lies:
        raise malformed(url, f"its tensors of {made:.0f} bytes repeat {lies:.0f} bytes again and again")
    _check_checksums(table, fragments.nbytes, refuse)


def named(name: tuple[str, str]) -> str:
    """A tensor and its state as a message has them, on one line whatever is in them."""
    return f"{_short(name[0])} ({_short(name[1])})" if not _plain(name) else f"{name[0]} ({name[1]})"


def _plain(name: tuple[str, str]) -> bool:
    return all(part.isprintable() and len(part) < 300 for part in name)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) < 300 else f"{text[:300]}..."


def spans(table: pa.Table, fragments: Fragments) -> Ints:
    """Bytes from the first to behind the last of each row."""
    return _spans(table, fragments, lambda bad, what: None)


def _spans(table: pa.Table, fragments: Fragments, refuse: _Refuse) -> Ints:
    """Bytes from the first to behind the last of each row, strides checked."""
    nbytes = fragments.nbytes
    column = table.column("byte_strides").combine_chunks()
    strided: Mask = column.is_valid().to_numpy(zero_copy_only=False)
    if not strided.any():
        return nbytes
    rows = np.flatnonzero(strided)
    lengths: Ints = column.value_lengths().drop_null().to_numpy(zero_copy_only=False).astype(np.int64)
    ndim = np.array([len(shape) for shape in fragments.shapes], dtype=np.int64)[fragments.key]
    wrong = np.zeros(len(strided), dtype=np.bool_)
    wrong[rows] = lengths != ndim[rows]
    refuse(wrong, "has strides for other dims than it has")
    dims = fragments.sizes.shape[1]
    strides = np.zeros((len(rows), dims), dtype=np.int64)
    strides[np.arange(dims) < lengths[:, None]] = column.drop_null().flatten().to_numpy(zero_copy_only=False)
    wrong[rows] = (strides < 0).any(axis=1)
    refuse(wrong, "has strides that lead back")
    steps = np.maximum(fragments.sizes[rows] - 1, 0)
    # In floating point first, where nothing overflows.
    reach = (steps.astype(np.float64) * strides.astype(np.float64)).sum(axis=1)
    wrong[rows] = reach >= float(END >> 1)
    refuse(wrong, "has strides that lead behind any file")
    item = np.array([ITEM_BYTES[d] for d in fragments.dtypes], dtype=np.int64)[fragments.key]
    span = nbytes.copy()
    span[rows] = np.where(nbytes[rows] > 0, (steps * strides).sum(axis=1) + item[rows], 0)
    wrong[rows] = table.column("checksums").combine_chunks().is_valid().to_numpy(zero_copy_only=False)[rows]
    refuse(wrong, "has checksums although its elements don't follow one another")
    return span


def _check_checksums(table: pa.Table, nbytes: Ints, refuse: _Refuse) -> None:
    column = table.column("checksums").combine_chunks()
    given: Mask = column.is_valid().to_numpy(zero_copy_only=False)
    if not given.any():
        return
    page = np.full(len(nbytes), SMALLEST, dtype=np.int64)
    while (small := (page < LARGEST) & (page * MOST_PAGES < nbytes)).any():
        page[small] *= 2
    counts = np.zeros(len(nbytes), dtype=np.int64)
    counts[given] = column.value_lengths().drop_null().to_numpy(zero_copy_only=False)
    refuse(given & (counts != -(-nbytes // page)), "has not one checksum for each of its pages")


def two_voices(url: str, name: tuple[str, str]) -> TensorMismatch:
    return TensorMismatch(
        url=url, problem=f"{named(name)} has two dtypes or shapes in one checkpoint; save it again."
    )
