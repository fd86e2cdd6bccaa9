"""A checkpoint seen through a specification, in either direction, and whether what it claims is so."""

from __future__ import annotations

import numpy as np

from elastic_train.checkpoint.dtypes import ELEMENTS
from elastic_train.checkpoint.language.mapped import Mapped, Readable
from elastic_train.checkpoint.language.resolve import Resolved, to_ours, to_theirs
from elastic_train.checkpoint.language.scalars import map_document
from elastic_train.checkpoint.language.specification import Spec
from elastic_train.checkpoint.row_blocks import rows
from elastic_train.errors import TensorMismatch

CLAIM = 32 << 20
"""Bytes that are compared at once."""


def as_ours(source: Readable, spec: Spec) -> Mapped:
    """Another system's checkpoint in our terms."""
    resolved = to_ours(spec, [source.tensors], aliases=source.aliases, url=source.url)
    return Mapped(resolved, [source], map_document(source.document, resolved, url=source.url), url=source.url)


def as_theirs(source: Readable, spec: Spec) -> Mapped:
    """A checkpoint in another system's terms."""
    (resolved,) = to_theirs(spec, source.tensors, aliases=source.aliases, url=source.url)
    return Mapped(resolved, [source], map_document(source.document, resolved, url=source.url), url=source.url)


def check_claims(mapped: Mapped) -> int:
    """Read what the specification says is equal, and compare the bits; how many pairs there were.

    TensorMismatch names the first two that differ.
    """
    claims = mapped.resolved.claims
    for name, kept, other in claims:
        pair = Resolved(tensors={("kept", "param"): kept, ("other", "param"): other}, aliases={}, rules={})
        both = Mapped(pair, mapped.parts, {}, url=mapped.url)
        if kept.shape != other.shape or kept.dtype != other.dtype:
            raise _differ(mapped, name)
        for box in rows(kept.shape, CLAIM // ELEMENTS[kept.dtype].bytes):
            found = both.read_many([("kept", "param", box), ("other", "param", box)])
            a, b = (np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in found)
            if not np.array_equal(a, b):
                raise _differ(mapped, name)
    return len(claims)


def _differ(mapped: Mapped, name: tuple[str, str]) -> TensorMismatch:
    return TensorMismatch(
        url=mapped.url,
        problem=f"{name[0]} ({name[1]}) is said to be a copy of another tensor, and differs from it. Correct "
        "the specification's ties and kinds.",
    )
