"""The index that is carried along says the same as one that is made anew."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.control import worker_index
from elastic_train.control.events import Node
from elastic_train.control.states import Worker

pytestmark = pytest.mark.ring0
NODES = tuple(Node(name=name, slots=2) for name in "abc")
ACTS = st.lists(
    st.tuples(st.sampled_from(["new", "gone", "two gone", "changed", "older"]), st.integers(0, 99))
)


def says_the_same(workers: tuple[Worker, ...]) -> None:
    index = worker_index.index_of(workers)
    taken = Counter(worker.node for worker in workers)
    assert index.by_name == {worker.name: worker for worker in workers}
    assert +index.taken == taken
    assert index.with_room(NODES) == {node.name for node in NODES if taken[node.name] < node.slots}
    for worker in workers:
        assert worker_index.find(workers, worker.name) is worker
    assert worker_index.find(workers, "w99999") is None


@given(ACTS)
def test_whatever_comes_and_goes_the_index_is_that_of_the_workers(acts: list[tuple[str, int]]) -> None:
    workers, before, born = tuple[Worker, ...](), tuple[Worker, ...](), 9990  # names grow by a digit
    for act, number in acts:
        older = workers
        match act:
            case "new":
                born += 1
                worker = Worker(name=f"w{born:04d}", node="abc"[number % 3], status="starting", since=0.0)
                workers = worker_index.with_new(workers, [worker])
            case "gone" if workers:
                workers = worker_index.without(workers, [workers[number % len(workers)]])
            case "two gone" if len(workers) > 2:
                workers = worker_index.without(workers, [workers[0], workers[-1]])
            case "changed" if workers:
                up = replace(workers[number % len(workers)], status="ready")
                workers = worker_index.with_changed(workers, up)
            case _:  # somebody asks about an older state
                says_the_same(before)
        if number % 2:
            says_the_same(workers)
        before = older
    says_the_same(workers)
