"""Index a run's workers by name and by node, and carry the index along as single ones come and go.

The state is made of tuples, and each event that changes the workers makes a new one. To look at each worker
at every loss would cost the square of a cluster that loses a part of itself. So the index of the tuple before
becomes that of the tuple after. It is derived: for any other tuple it is made anew.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

from elastic_train.control.events import Node
from elastic_train.control.identity_cache import Carried
from elastic_train.control.states import Worker

Workers = tuple[Worker, ...]


@dataclass(slots=True, eq=False)
class WorkerIndex:
    by_name: dict[str, Worker]
    taken: Counter[str]  # workers by node
    _nodes: tuple[Node, ...] | None = None
    _slots: dict[str, int] = field(default_factory=dict[str, int])
    _with_room: set[str] = field(default_factory=set[str])

    def with_room(self, nodes: tuple[Node, ...]) -> set[str]:
        """Names of the nodes that have fewer workers than fit."""
        if self._nodes is not nodes:
            self._nodes, self._slots = nodes, {node.name: node.slots for node in nodes}
            self._with_room = {name for name, slots in self._slots.items() if self.taken[name] < slots}
        return self._with_room

    def count(self, node: str, more: int) -> None:
        """A node has so many workers more."""
        self.taken[node] += more
        if self.taken[node] < self._slots.get(node, 0):
            self._with_room.add(node)
        else:
            self._with_room.discard(node)


def _made(workers: Workers) -> WorkerIndex:
    return WorkerIndex(
        by_name={worker.name: worker for worker in workers}, taken=Counter([w.node for w in workers])
    )


_index: Carried[Workers, WorkerIndex] = Carried(_made)


def index_of(workers: Workers) -> WorkerIndex:
    return _index.of(workers)


def find(workers: Workers, name: str) -> Worker | None:
    place = _place(workers, name)
    return workers[place] if place is not None else index_of(workers).by_name.get(name)


def with_new(workers: Workers, new: list[Worker]) -> Workers:
    """With workers that are started now."""
    index = _index.take(workers)
    for worker in new:
        index.by_name[worker.name] = worker
        index.count(worker.node, 1)
    return _index.put((*workers, *new), index)


def with_changed(workers: Workers, changed: Worker) -> Workers:
    """With another state of a worker that is among them."""
    place = _place(workers, changed.name)
    if place is None:
        return tuple(changed if worker.name == changed.name else worker for worker in workers)
    index = _index.take(workers)
    index.by_name[changed.name] = changed
    return _index.put((*workers[:place], changed, *workers[place + 1 :]), index)


def without(workers: Workers, gone: list[Worker]) -> Workers:
    """Without workers that are among them."""
    place = _place(workers, gone[0].name) if len(gone) == 1 else None
    if place is None:
        names = {worker.name for worker in gone}
        return tuple([worker for worker in workers if worker.name not in names])
    index = _index.take(workers)
    del index.by_name[gone[0].name]
    index.count(gone[0].node, -1)
    return _index.put((*workers[:place], *workers[place + 1 :]), index)


def _place(workers: Workers, name: str) -> int | None:
    """Where a worker is, if they are in the order in which they were started, as they mostly are."""
    place = bisect_left(workers, (len(name), name), key=lambda worker: (len(worker.name), worker.name))
    return place if place < len(workers) and workers[place].name == name else None
