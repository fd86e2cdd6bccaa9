"""Coverage: which elements a table of fragments holds, found by cutting boxes into cells.

Boxes of one tensor are cut along each other's edges, dim after dim, each dim only against the boxes in the
same slab of the dims before it. The cells that come out are equal or share nothing, so that questions about
elements become questions about integers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from elastic_train.geometry.box import Box
from elastic_train.geometry.fragments import Fragments, Ints
from elastic_train.geometry.runs import cut_in_runs

FREE_CELLS, CELLS_OF_A_BOX = 1_000_000, 8
"""Cells in which a tiling is checked: of boxes that divide a tensor there are about as many as boxes."""
Whole = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Uncovered:
    """Needed elements that no source holds: disjoint boxes, by tensor and state."""

    fragments: Fragments

    @property
    def boxes(self) -> dict[tuple[str, str], tuple[Box, ...]]:
        return _by_name(self.fragments)

    def __str__(self) -> str:
        return f"nobody holds {_listed(self.fragments)}"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Surplus:
    """Elements held more than once or outside their tensor: disjoint boxes, by tensor and state."""

    fragments: Fragments

    @property
    def boxes(self) -> dict[tuple[str, str], tuple[Box, ...]]:
        return _by_name(self.fragments)

    def __str__(self) -> str:
        return f"held twice or outside the tensor: {_listed(self.fragments)}"


def whole(fragments: Fragments) -> Fragments:
    """One row per name: all of its tensor."""
    return Fragments.of(
        (tensor, state, dtype, shape, Box.whole(shape))
        for (tensor, state), dtype, shape in zip(
            fragments.names, fragments.dtypes, fragments.shapes, strict=True
        )
    )


def uncovered(needs: Fragments, haves: Fragments) -> Uncovered | None:
    """The elements of `needs` that are in no row of `haves`, None where there are none."""
    rows = Fragments.concat([needs, haves])
    rows, count = _without_empty(rows, len(needs))
    cells = cut(rows.key, rows.offsets, rows.offsets + rows.sizes)
    needed = cells.row < count
    held = np.zeros(_length(cells.cell), dtype=np.bool_)
    held[cells.cell[~needed]] = True
    gaps = _fragments(rows, cells, needed & ~held[cells.cell])
    return Uncovered(fragments=gaps) if len(gaps) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tangled:
    """Boxes that cut each other into far more cells than there are boxes, which no sharding does."""

    tensor: str
    state: str
    boxes: int

    def __str__(self) -> str:
        return f"{self.boxes} boxes cut each other in too many ways, most of {self.tensor} ({self.state})"


def untiled(fragments: Fragments) -> Uncovered | Surplus | Tangled | None:
    """Why the rows are no tiling of the tensors they name; None where each element is in exactly one row.

    The work is bounded by the number of rows, whatever their boxes are.
    """
    open_ones = ~cut_in_runs(fragments)
    if not open_ones.any():
        return None
    tensors, fragments = whole(fragments).take(open_ones), fragments.take(open_ones[fragments.key])
    rows, count = _without_empty(Fragments.concat([tensors, fragments]), len(tensors))
    most = FREE_CELLS + CELLS_OF_A_BOX * len(rows)
    cells = _cut(rows.key, rows.offsets, rows.offsets + rows.sizes, most)
    if cells is None:
        tensor, state = fragments.names[int(np.argmax(np.bincount(fragments.key)))]
        return Tangled(tensor=tensor, state=state, boxes=len(fragments))
    given = cells.row >= count
    times = np.bincount(cells.cell[given], minlength=_length(cells.cell))
    gaps = _fragments(rows, cells, ~given & (times[cells.cell] == 0))
    if len(gaps):
        return Uncovered(fragments=gaps)
    inside = np.zeros(len(times), dtype=np.bool_)
    inside[cells.cell[~given]] = True
    surplus = _fragments(rows, cells, given & ((times[cells.cell] > 1) | ~inside[cells.cell]))
    return Surplus(fragments=surplus) if len(surplus) else None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cells:
    """The given boxes cut into cells: `row` is the box a cell is part of, `cell` is equal for equal cells.

    Cells of one row are consecutive, rows in the order given. `low` and `high` are [n, D].
    """

    row: Ints
    cell: Ints
    low: Ints
    high: Ints


def cut(group: Whole, low: Ints, high: Ints) -> Cells:
    """Cut boxes [low, high), none empty, against all others of the same group (small numbers >= 0)."""
    cells = _cut(group, low, high, None)
    assert cells is not None
    return cells


def _cut(group: Whole, low: Ints, high: Ints, most: int | None) -> Cells | None:
    """The same, or None where there would be more than `most` cells."""
    row = np.arange(len(group), dtype=np.int64)
    cell = np.asarray(group, dtype=np.int64)
    for dim in range(low.shape[1]):
        if _constant(cell, low[:, dim]) and _constant(cell, high[:, dim]):
            continue
        values, rank = np.unique(np.concatenate([low[:, dim], high[:, dim]]), return_inverse=True)
        # Every edge of every cell so far, numbered by (cell, place): the edges of a cell are consecutive.
        edges, at = np.unique(np.concatenate([cell, cell]) * len(values) + rank, return_inverse=True)
        first, last = at[: len(cell)], at[len(cell) :]
        parts = last - first
        if most is not None and int(parts.sum()) > most:
            return None
        source, cell = spread(first, parts)
        row, low, high = row[source], low[source], high[source]
        low[:, dim] = values[edges[cell] % len(values)]
        high[:, dim] = values[edges[cell + 1] % len(values)]
    return Cells(row=row, cell=cell, low=low, high=high)


def spread(first: Ints, lengths: Ints) -> tuple[Ints, Ints]:
    """The ranges first[i] .. first[i] + lengths[i] - 1 one after the other: (i, number) of each."""
    source = np.repeat(np.arange(len(lengths), dtype=np.int64), lengths)
    starts = np.cumsum(lengths) - lengths
    return source, np.arange(len(source), dtype=np.int64) - starts[source] + first[source]


def distinct(group: Whole, columns: Ints) -> tuple[Ints, Ints]:
    """Equal rows found: (a row of each kind, the kind of each row). Groups are never of one kind."""
    _, first, kind = np.unique(group, return_index=True, return_inverse=True)
    for column in columns.T:
        if not _constant(kind, column):
            values, rank = np.unique(column, return_inverse=True)
            _, first, kind = np.unique(kind * len(values) + rank, return_index=True, return_inverse=True)
    return first.astype(np.int64), kind.astype(np.int64)


def joined(group: Ints, low: Ints, high: Ints) -> tuple[Ints, Ints, Ints]:
    """Disjoint boxes of one group that share a whole face made one: (a row of each, its low, its high)."""
    row = np.arange(len(group), dtype=np.int64)
    for dim in reversed(range(low.shape[1])):
        others = [c[row, d] for d in range(low.shape[1]) if d != dim for c in (low, high)]
        order = np.lexsort((low[row, dim], *others, group[row]))
        row = row[order]
        starts = np.ones(len(row), dtype=np.bool_)
        starts[1:] = (group[row[1:]] != group[row[:-1]]) | (low[row[1:], dim] != high[row[:-1], dim])
        for other in others:
            starts[1:] |= other[order[1:]] != other[order[:-1]]
        heads = np.flatnonzero(starts)
        tails = np.append(heads[1:], len(row))[: len(heads)] - 1
        high = high.copy()
        high[row[heads], dim] = high[row[tails], dim]
        row = row[heads]
    return row, low[row], high[row]


def _constant(group: Ints, column: Ints) -> bool:
    """Whether all rows of a group have the same value."""
    value = np.zeros(_length(group), dtype=np.int64)
    value[group] = column
    return bool(np.array_equal(value[group], column))


def _length(numbers: Ints) -> int:
    return int(numbers.max()) + 1 if len(numbers) else 0


def _without_empty(rows: Fragments, count: int) -> tuple[Fragments, int]:
    """The rows that hold an element, and how many of the first `count` do."""
    full = rows.numel > 0
    return rows.take(full), int(full[:count].sum())


def _fragments(rows: Fragments, cells: Cells, chosen: npt.NDArray[np.bool_]) -> Fragments:
    """The chosen cells, each once, neighbours made one."""
    at = np.flatnonzero(chosen)
    at = at[np.unique(cells.cell[at], return_index=True)[1]]
    key = rows.key[cells.row[at]]
    row, low, high = joined(key.astype(np.int64), cells.low[at], cells.high[at])
    return Fragments(
        names=rows.names,
        dtypes=rows.dtypes,
        shapes=rows.shapes,
        key=key[row],
        offsets=low,
        sizes=high - low,
    )


def _by_name(fragments: Fragments) -> dict[tuple[str, str], tuple[Box, ...]]:
    found: dict[tuple[str, str], tuple[Box, ...]] = {}
    for row in range(len(fragments)):
        name = fragments.names[int(fragments.key[row])]
        found[name] = (*found.get(name, ()), fragments.box(row))
    return found


def _listed(fragments: Fragments, most: int = 3) -> str:
    """The first few boxes, for a person."""
    texts: list[str] = []
    for row in range(min(most, len(fragments))):
        tensor, state = fragments.names[int(fragments.key[row])]
        box = fragments.box(row)
        spans = (f"{o}:{o + s}" for o, s in zip(box.offsets, box.sizes, strict=True))
        texts.append(f"{tensor} ({state}) [{', '.join(spans)}]")
    more = len(fragments) - most
    return ", ".join(texts) + (f" and {more} more" if more > 0 else "")
