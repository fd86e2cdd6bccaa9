"""Cut a tensor into boxes that follow one another in row-major order."""

from __future__ import annotations

import math
from collections.abc import Iterator

from elastic_train.geometry.box import Box


def rows(shape: tuple[int, ...], most: int) -> Iterator[Box]:
    """Boxes of at most `most` elements, one after the other in row-major order; one for an empty tensor."""
    if math.prod(shape) <= max(1, most):
        yield Box.whole(shape)
        return
    dim = next(d for d in range(len(shape)) if math.prod(shape[d + 1 :]) <= max(1, most))
    step = max(1, most // math.prod(shape[dim + 1 :]))
    for lead in _numbers(shape[:dim]):
        for start in range(0, shape[dim], step):
            offsets = (*lead, start, *(0,) * (len(shape) - dim - 1))
            yield Box(offsets, (*(1,) * dim, min(step, shape[dim] - start), *shape[dim + 1 :]))


def _numbers(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    if not shape:
        yield ()
        return
    for first in range(shape[0]):
        for rest in _numbers(shape[1:]):
            yield (first, *rest)
