"""Rows of an older checkpoint that a writer may repeat instead of writing their bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from elastic_train.checkpoint.manifest import Row
from elastic_train.geometry.box import Box

Key = tuple[str, str, str, tuple[int, ...], Box]
"""Tensor, state, dtype, shape and box."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unchanged:
    """`stable` tensors, and rows of the newest checkpoint that hold parts of them."""

    stable: frozenset[str] = frozenset()
    rows: Mapping[Key, Row] = field(default_factory=dict)

    def row(self, key: Key, content: bytes) -> Row | None:
        """The row to repeat, if the bytes have the same hash."""
        found = self.rows.get(key)
        return found if found is not None and found.hash == content else None
