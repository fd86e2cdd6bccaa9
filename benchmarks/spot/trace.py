"""A trace of spot capacity, as few nodes and as little time as a small machine has.

A trace is a CSV file with the columns `time_s` and `total`: how many nodes there are from a time on.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from elastic_train.cluster.local_cluster import LocalCluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """From `at_s` on there are `nodes`."""

    at_s: float
    nodes: int


def scaled(trace: Path, *, nodes: int, seconds: float) -> tuple[Capacity, ...]:
    """A trace with its largest capacity as `nodes`, at least one, and its last change before `seconds`.

    Changes that are none at this scale are left out.
    """
    with trace.open(newline="") as file:
        rows = [(float(row["time_s"]), int(row["total"])) for row in csv.DictReader(file)]
    begin, most = rows[0][0], max(total for _, total in rows)
    tail = (rows[-1][0] - begin) / max(len(rows) - 1, 1)  # the last one is as long as others
    factor = seconds / (rows[-1][0] - begin + tail)
    all_ = [
        Capacity(at_s=(at - begin) * factor, nodes=max(1, round(total * nodes / most))) for at, total in rows
    ]
    return (all_[0], *(after for before, after in pairwise(all_) if after.nodes != before.nodes))


class Replay:
    """Takes nodes from a cluster and gives it some, as a trace says. `begin` starts its clock.

    Call `due` from the main thread: only there nodes can be added.
    """

    def __init__(self, cluster: LocalCluster, trace: tuple[Capacity, ...], *, seed: int) -> None:
        self._cluster, self._left, self._draw = cluster, list(trace[1:]), random.Random(seed)
        self._wanted = trace[0].nodes
        self.begun: float | None = None
        self.done: list[tuple[float, int]] = []  # when, how many nodes then

    def begin(self, now: float) -> None:
        if self.begun is None:
            self.begun = now

    @property
    def nodes(self) -> int:
        return len(self._cluster.nodes)

    def due(self, now: float, kill: Callable[[str], object]) -> None:
        """Do what is due by now; `kill` ends a node. One that does not start in time is tried again later."""
        while self.begun is not None and self._left and now - self.begun >= self._left[0].at_s:
            self._wanted = self._left.pop(0).nodes
            while self.nodes > self._wanted:
                kill(self._draw.choice(self._cluster.nodes).node_id)
            self.done.append((now, self._wanted))
        try:
            while self.nodes < self._wanted:
                self._cluster.add_node()
        except (TimeoutError, RuntimeError) as error:
            print(f"a node did not start: {error}", flush=True)

    def over(self, now: float, seconds: float) -> bool:
        return self.begun is not None and now - self.begun >= seconds
