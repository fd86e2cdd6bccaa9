"""Selects, of boxes with several holders, the holders that are bitwise right."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from elastic_train.geometry.box import Box
from elastic_train.geometry.fragments import Fragments

Row = tuple[tuple[str, str], Box]


def exact_first(tables: Sequence[Fragments], inexact: Sequence[frozenset[str]]) -> list[Fragments]:
    """The holders' tables without what one has only up to rounding where another has it exactly.

    `inexact` are names of tensors, by holder. Holders that both went back by an undo have the same bits.
    """
    if not any(inexact):
        return list(tables)
    exact: set[Row] = set()
    for table, names in zip(tables, inexact, strict=True):
        exact.update(row for row in _rows(table) if row[0][0] not in names)
    kept: list[Fragments] = []
    for table, names in zip(tables, inexact, strict=True):
        stays = [row[0][0] not in names or row not in exact for row in _rows(table)]
        kept.append(table.take(np.array(stays, dtype=bool)))
    return kept


def _rows(table: Fragments) -> list[Row]:
    return [(table.names[key], table.box(at)) for at, key in enumerate(table.key.tolist())]
