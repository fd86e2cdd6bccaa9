"""Read straight into the caller's arrays where no conversion is needed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from elastic_train.checkpoint.dtypes import ELEMENTS
from elastic_train.checkpoint.lazy_arrays import Array
from elastic_train.checkpoint.ranges import FragmentRange, Read, Request
from elastic_train.geometry.box import Box
from elastic_train.geometry.layout import flat_range_boxes

MOST = 64
"""Segments of a read that are worth it; of many small ones a copy is cheaper."""


def targets(
    read: Read, requests: Sequence[Request], outputs: Sequence[Array]
) -> list[list[memoryview]] | None:
    """Buffers for all bytes of a read, in order: those of each segment, then those of the gap after it.

    None where elements that follow one another in the file don't in the result. Bytes that nobody asked for,
    such as the rest of a page, go into memory of their own.
    """
    if len(read.segments) > MOST:
        return None
    found: list[list[memoryview]] = []
    end = read.start
    for segment in read.segments:
        own = _of_segment(segment, requests, outputs) if segment.start >= end else None
        if own is None:
            return None
        if found:
            found.append(_scratch(segment.start - end))
        found.append(own)
        end = segment.start + segment.length
    return found


def _of_segment(
    segment: FragmentRange, requests: Sequence[Request], outputs: Sequence[Array]
) -> list[memoryview] | None:
    row = segment.row
    if len(segment.wanted) != 1 or row.byte_strides is not None:
        return None
    ((index, part),) = segment.wanted
    sizes, item = row.box.sizes, ELEMENTS[row.dtype].bytes
    first = sum(o * math.prod(sizes[d + 1 :]) for d, o in enumerate(part.offsets))
    if flat_range_boxes(sizes, first, first + part.numel) != (part,):
        return None
    offsets = tuple(a + b for a, b in zip(part.offsets, row.box.offsets, strict=True))
    place = Box(offsets, part.sizes).within(requests[index][2])
    output = outputs[index][(*place.slices, ...)]
    if not output.flags.c_contiguous:
        return None
    view = output.reshape(-1).view(np.uint8).data
    before = (
        first * item - segment.at
    )  # bytes of the segment before the part, negative: of the part before it
    low, high = max(0, before), min(segment.length, before + len(view))
    if low >= high:
        return None
    return [*_scratch(low), view[low - before : high - before], *_scratch(segment.length - high)]


def _scratch(size: int) -> list[memoryview]:
    return [memoryview(bytearray(size))] if size else []
