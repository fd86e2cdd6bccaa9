"""Transfer plans: which bytes go from which holder to which rank.

Local first, then from the same node, then from peers, so that all serve about equally many bytes.
Invariant: *every needed element is delivered exactly once*.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from elastic_train.geometry.box import Box
from elastic_train.geometry.coverage import Uncovered, cut, distinct, joined, spread, uncovered
from elastic_train.geometry.fragments import ITEM_BYTES, Fragments, Ints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Transfers:
    """n boxes to copy: columns. Sorted by rank, holder, row of the need and row of the have.

    `key` counts in `names`; `need` is the row in the rank's own table that the box is part of, `have` the row
    in the holder's. `offsets` and `sizes` are [n, D], in coordinates of the whole tensor.
    """

    names: tuple[tuple[str, str], ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    rank: npt.NDArray[np.int32]
    holder: npt.NDArray[np.int32]
    key: npt.NDArray[np.int32]
    need: Ints
    have: Ints
    offsets: Ints
    sizes: Ints
    nbytes: Ints

    def __len__(self) -> int:
        return len(self.rank)

    def box(self, row: int) -> Box:
        dims = len(self.shapes[int(self.key[row])])
        return Box(tuple(self.offsets[row, :dims].tolist()), tuple(self.sizes[row, :dims].tolist()))

    def rows_of(self, rank: int) -> range:
        """The rows that a rank receives."""
        first, stop = np.searchsorted(self.rank, [rank, rank + 1])
        return range(int(first), int(stop))

    def boxes(self, rows: npt.NDArray[np.bool_]) -> Fragments:
        """The boxes of the rows that a mask chooses."""
        return Fragments(
            names=self.names,
            dtypes=self.dtypes,
            shapes=self.shapes,
            key=self.key[rows],
            offsets=self.offsets[rows],
            sizes=self.sizes[rows],
        )


def plan_transfer(
    needs: Sequence[Fragments],
    haves: Sequence[Fragments],
    *,
    need_nodes: Sequence[str],
    have_nodes: Sequence[str],
    same: Mapping[int, int],
) -> Transfers | Uncovered:
    """Who sends what to whom, so that each rank gets what `needs[rank]` lists from those who hold it.

    The boxes of `haves` may repeat and overlap each other. `same` maps a rank to the holder that is its own
    process. A rank whose table repeats an element receives it once for each of these rows.
    """
    assert len(needs) == len(need_nodes)
    assert len(haves) == len(have_nodes)
    rows, wanted, held = _stack(needs, haves)
    low, high = rows.offsets, rows.offsets + rows.sizes
    boxes, kind = distinct(rows.key, np.concatenate([low, high], axis=1))
    # Needed and held boxes are cut against each other once per kind, however many ranks share them.
    is_need = np.zeros(len(boxes), dtype=np.bool_)
    is_need[kind[wanted.at]] = True
    is_have = np.zeros(len(boxes), dtype=np.bool_)
    is_have[kind[held.at]] = True
    cells = cut(rows.key[boxes], low[boxes], high[boxes])

    entries = _entries(kind[held.at], held, np.flatnonzero(is_have[cells.row]), cells.row, cells.cell)
    needed = np.flatnonzero(is_need[cells.row])
    if (entries.set_of_cell[cells.cell[needed]] < 0).any():
        missing = uncovered(Fragments.concat(needs), Fragments.concat(haves))
        assert missing is not None
        return missing

    # One item per row that needs a cell: the cells of a kind are consecutive.
    counts = np.bincount(cells.row[needed], minlength=len(boxes))
    firsts = np.cumsum(counts) - counts
    source, at = spread(firsts[kind[wanted.at]], counts[kind[wanted.at]])
    at = needed[at]
    item_bytes = np.array([ITEM_BYTES[d] for d in rows.dtypes], dtype=np.int64)[rows.key[wanted.at][source]]
    nbytes = np.prod(cells.high[at] - cells.low[at], axis=1, dtype=np.int64) * item_bytes
    nodes = {name: i for i, name in enumerate(dict.fromkeys([*have_nodes, *need_nodes]))}
    chosen = _choose(
        entries,
        sets=entries.set_of_cell[cells.cell[at]],
        rank=wanted.owner[source],
        nbytes=nbytes,
        need_nodes=np.array([nodes[n] for n in need_nodes], dtype=np.int64),
        have_nodes=np.array([nodes[n] for n in have_nodes], dtype=np.int64),
        same=same,
    )
    return _transfers(rows, wanted, held, source, entries.row[chosen], cells.low[at], cells.high[at])


@dataclass(frozen=True, slots=True, eq=False)
class _Side:
    """Rows of several tables, stacked: where each is in the stack, whose it is, and its row there."""

    at: Ints
    owner: Ints
    row: Ints


def _stack(needs: Sequence[Fragments], haves: Sequence[Fragments]) -> tuple[Fragments, _Side, _Side]:
    """All rows that hold an element and bear a name that is needed."""
    rows = Fragments.concat([*needs, *haves])
    tables = [*needs, *haves]
    owner = np.repeat(np.arange(len(tables), dtype=np.int64), [len(t) for t in tables])
    row = spread(np.zeros(len(tables), np.int64), np.array([len(t) for t in tables], np.int64))[1]
    needed = np.zeros(len(rows.names), dtype=np.bool_)
    needed[rows.key[owner < len(needs)]] = True
    kept = np.flatnonzero((rows.numel > 0) & needed[rows.key])
    owner, row = owner[kept], row[kept]
    at = np.arange(len(kept), dtype=np.int64)
    mine = owner < len(needs)
    return (
        rows.take(kept),
        _Side(at[mine], owner[mine], row[mine]),
        _Side(at[~mine], owner[~mine] - len(needs), row[~mine]),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Entries:
    """Sets of holders: `holder[i]` has the cells of set `set[i]`, in its row `row[i]` of the held ones.

    `set_of_cell` is -1 where no source holds a cell.
    """

    set_of_cell: Ints
    set: Ints
    holder: Ints
    row: Ints


def _entries(kind: Ints, held: _Side, at: Ints, cell_box: Ints, cell: Ints) -> _Entries:
    """A set per kind of held box; a cell that lies in several kinds has a set of its own.

    `kind` is per held row; `at` are the cells that are held, in columns `cell_box` and `cell`.
    """
    total = int(cell.max()) + 1 if len(cell) else 0
    kinds = int(cell_box.max()) + 1 if len(cell_box) else 0
    times = np.bincount(cell[at], minlength=total)
    set_of_cell = np.full(total, -1, dtype=np.int64)
    set_of_cell[cell[at]] = cell_box[at]
    several = times > 1
    set_of_cell[several] = kinds + np.arange(int(several.sum()), dtype=np.int64)

    by_kind = np.argsort(kind, kind="stable")
    counts = np.bincount(kind, minlength=kinds)
    firsts = np.cumsum(counts) - counts
    pairs = at[several[cell[at]]]
    source, extra = spread(firsts[cell_box[pairs]], counts[cell_box[pairs]])
    sets = np.concatenate([kind, set_of_cell[cell[pairs[source]]]])
    index = np.concatenate([np.arange(len(kind), dtype=np.int64), by_kind[extra]])
    return _Entries(set_of_cell, sets, held.owner[index], index)


def _choose(
    entries: _Entries,
    *,
    sets: Ints,
    rank: Ints,
    nbytes: Ints,
    need_nodes: Ints,
    have_nodes: Ints,
    same: Mapping[int, int],
) -> Ints:
    """The entry that serves each item: of the rank's own process, else of its node, else of any."""
    holders, nodes = len(have_nodes), int(max(have_nodes.max(initial=0), need_nodes.max(initial=0))) + 1
    code = (entries.set * nodes + have_nodes[entries.holder]) * holders + entries.holder
    code, order = np.unique(code, return_index=True)  # a holder of the same cell twice serves it once

    own = np.full(len(need_nodes), -1, dtype=np.int64)
    own[list(same)] = list(same.values())
    own_holder = own[rank]
    wanted = (sets * nodes + have_nodes[own_holder]) * holders + own_holder
    entry = np.minimum(np.searchsorted(code, wanted), len(code) - 1)
    local = (own_holder >= 0) & (code[entry] == wanted)

    near = sets * nodes + need_nodes[rank]
    first, stop = np.searchsorted(code, near * holders), np.searchsorted(code, (near + 1) * holders)
    remote = ~local & (first == stop)
    first = np.where(remote, np.searchsorted(code, sets * nodes * holders), first)
    stop = np.where(remote, np.searchsorted(code, (sets + 1) * nodes * holders), stop)

    load = np.zeros(holders, dtype=np.int64)
    for some in (np.flatnonzero(~local & ~remote), np.flatnonzero(remote)):
        entry[some] = _balance(first[some], stop[some], nbytes[some], entries.holder[order], load)
    return order[entry]


def _balance(first: Ints, stop: Ints, nbytes: Ints, holder: Ints, load: Ints) -> Ints:
    """An entry of first .. stop - 1 for each item, so that holders' loads (updated) stay even.

    Items with one choice first, then the largest first, each to the least loaded (Graham, "Bounds on
    multiprocessing timing anomalies", 1969).
    """
    chosen = first.copy()
    forced = stop - first == 1
    np.add.at(load, holder[first[forced]], nbytes[forced])
    free = np.flatnonzero(~forced)
    free = free[np.lexsort((-nbytes[free], stop[free], first[free]))]
    begins = np.flatnonzero(np.diff(first[free], prepend=-1) | np.diff(stop[free], prepend=-1))
    ends = np.append(begins[1:], len(free))[: len(begins)]
    order = np.argsort(-nbytes[free[begins]], kind="stable")

    # From here on lists: indexing an array number by number is several times slower.
    loads, holders, sizes = load.tolist(), holder.tolist(), nbytes[free].tolist()
    picks = [0] * len(free)
    heads = free[begins[order]]
    for begin, end, low, high in zip(
        begins[order].tolist(), ends[order].tolist(), first[heads].tolist(), stop[heads].tolist(), strict=True
    ):
        heap = [(loads[holders[entry]], entry) for entry in range(low, high)]
        heapq.heapify(heap)
        for at in range(begin, end):
            total, entry = heap[0]
            heapq.heapreplace(heap, (total + sizes[at], entry))
            picks[at] = entry
        for total, entry in heap:
            loads[holders[entry]] = total
    chosen[free] = picks
    load[:] = loads
    return chosen


def _transfers(
    rows: Fragments, wanted: _Side, held: _Side, source: Ints, have: Ints, low: Ints, high: Ints
) -> Transfers:
    """Columns of the plan: cells that go from one row to one row made one box again."""
    pair = np.unique(source * max(1, len(held.at)) + have, return_inverse=True)[1].astype(np.int64)
    if len(pair) and np.bincount(pair).max() > 1:
        kept, low, high = joined(pair, low, high)
        source, have = source[kept], have[kept]
    key = rows.key[wanted.at[source]]
    item_bytes = np.array([ITEM_BYTES[d] for d in rows.dtypes], dtype=np.int64)
    columns = (
        wanted.owner[source],
        held.owner[have],
        wanted.row[source],
        held.row[have],
        *low.T,
    )
    order = np.lexsort(columns[::-1])
    sizes = (high - low)[order]
    return Transfers(
        names=rows.names,
        dtypes=rows.dtypes,
        shapes=rows.shapes,
        rank=columns[0][order].astype(np.int32),
        holder=columns[1][order].astype(np.int32),
        key=key[order],
        need=columns[2][order],
        have=columns[3][order],
        offsets=low[order],
        sizes=sizes,
        nbytes=np.prod(sizes, axis=1, dtype=np.int64) * item_bytes[key[order]],
    )
