"""Stored tensors in memory, read the way a checkpoint is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest

from elastic_train.checkpoint.language.mapped import Mapped
from elastic_train.checkpoint.language.parse import parse
from elastic_train.checkpoint.language.resolve import to_ours, to_theirs
from elastic_train.checkpoint.lazy_arrays import Array, TensorInfo
from elastic_train.checkpoint.ranges import Request

Named = Mapping[str, np.ndarray]


class Arrays:
    """Arrays by name (state `param`) or by (name, state)."""

    url = "arrays"

    def __init__(self, arrays: Mapping[str | tuple[str, str], np.ndarray]) -> None:
        self.arrays = {(k, "param") if isinstance(k, str) else k: v for k, v in arrays.items()}
        self.tensors = {k: TensorInfo(dtype=v.dtype.name, shape=v.shape) for k, v in self.arrays.items()}
        self.aliases: dict[str, str] = {}
        self.document: dict[str, object] = {}

    def read_many(self, requests: Sequence[Request], *, into: Sequence[Array] | None = None) -> list[Array]:
        found = [self.arrays[tensor, state][box.slices] for tensor, state, box in requests]
        for target, array in zip(into or (), found, strict=True):
            assert target.shape == array.shape
            target[...] = array
        return found


def whole(mapped: Mapped) -> dict[str | tuple[str, str], np.ndarray]:
    """Every tensor, parameters by name alone."""
    return {(t if s == "param" else (t, s)): mapped.read(t, s) for t, s in mapped.tensors}


@pytest.fixture
def imported() -> Callable[..., dict]:
    """Read parts through a specification."""

    def read(text: str, *parts: Mapping) -> dict:
        sources = [Arrays(p) for p in parts]
        resolved = to_ours(parse(text), [s.tensors for s in sources], url="theirs")
        return whole(Mapped(resolved, sources, {}, url="ours"))

    return read


@pytest.fixture
def exported() -> Callable[..., list[dict]]:
    """Read ours through a specification, as each of their parts."""

    def read(text: str, ours: Mapping, parts: int = 1) -> list[dict]:
        source = Arrays(ours)
        found = to_theirs(parse(text), source.tensors, parts=parts, url="ours")
        return [whole(Mapped(r, [source], {}, url="theirs")) for r in found]

    return read
