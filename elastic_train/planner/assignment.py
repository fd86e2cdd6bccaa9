"""Min-cost assignment: the Hungarian method as shortest augmenting paths.

Crouse, "On implementing 2D rectangular assignment algorithms" (IEEE TAES 2016), after Jonker and Volgenant
(1987). Rows search one after the other; each search is a Dijkstra over columns with reduced costs.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def assign(cost: NDArray[np.float64]) -> NDArray[np.int64]:
    """The column of each row, all distinct, with the least sum. At most as many rows as columns."""
    rows, columns = cost.shape
    assert rows <= columns
    u, v = np.zeros(rows), np.zeros(columns)
    row_of = np.full(columns, -1)
    column_of = np.full(rows, -1)
    for start in range(rows):
        shortest = np.full(columns, np.inf)
        came = np.full(columns, -1)
        done = np.zeros(columns, bool)
        seen: list[int] = []
        row, length, sink = start, 0.0, -1
        while sink < 0:
            seen.append(row)
            reach = length + cost[row] - u[row] - v
            better = ~done & (reach < shortest)
            shortest[better] = reach[better]
            came[better] = row
            open_ = np.where(done, np.inf, shortest)
            length = float(open_.min())
            ends = np.flatnonzero(open_ == length)
            free = ends[row_of[ends] < 0]  # of equally near columns one that is free ends the search
            column = int(free[0] if len(free) else ends[0])
            done[column] = True
            if row_of[column] < 0:
                sink = column
            else:
                row = int(row_of[column])
        u[start] += length
        for other in seen[1:]:
            u[other] += length - shortest[column_of[other]]
        v[done] -= length - shortest[done]
        while True:  # turn the path around
            row = int(came[sink])
            row_of[sink] = row
            column_of[row], sink = sink, int(column_of[row])
            if row == start:
                break
    return column_of
