"""Groups form, break and form again in living processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from elastic_train.errors import GroupBroken
from elastic_train.testing.gloo_pool import GlooPool, PerRank, Returned
from elastic_train.train.group import Group, is_collective_error

pytestmark = pytest.mark.ring2

State = dict[str, Any]


def form(state: State, pool_store: tuple[str, int], generation: int, rank: int, size: int) -> None:
    host, port = pool_store
    group = Group(
        generation=generation,
        rank=rank,
        world_size=size,
        store_host=host,
        store_port=port,
        address="127.0.0.1",
    )
    state["group"] = group
    group.form()


def form_timed(state: State, *args: Any) -> str:
    try:
        form(state, *args)
    except GroupBroken as error:
        state["group"].destroy()
        return str(error)
    return "formed"


def destroy(state: State) -> None:
    state.pop("group").destroy()


def total(state: State, value: float) -> float:
    tensor = torch.tensor([value])
    dist.all_reduce(tensor)
    return tensor.item()


def reduce_forever(state: State) -> str:
    """All-reduces until one fails; says whether the failure is recognised."""
    tensor = torch.ones(1 << 16)
    try:
        while True:
            tensor.fill_(1)
            dist.all_reduce(tensor)
            state["reduced"] = True
    except RuntimeError as error:
        return f"{is_collective_error(error)}"


def has_reduced(state: State) -> bool:
    return state.get("reduced", False)


def break_group(state: State) -> None:
    state["group"].break_()


def has_group(state: State) -> bool:
    return "group" in state


def start(pool: GlooPool, generation: int, ranks: Sequence[int]) -> None:
    """The processes `ranks` form a generation, ranked in the order given."""
    store = (pool.store_host, pool.store_port)
    pool.run(form, store, generation, PerRank(range(len(ranks))), len(ranks), ranks=ranks)


def wait_until(condition: Any, timeout: float = 30.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_survivors_of_a_lost_peer_unblock_within_a_second_of_the_break_and_form_again(
    pool: GlooPool, new_generation: Iterator[int], how: str
) -> None:
    start(pool, next(new_generation), [0, 1, 2, 3])
    busy = pool.call_async(reduce_forever)
    survivors = [0, 1, 3]
    wait_until(lambda: all(pool.control(rank, has_reduced) for rank in range(4)))
    getattr(pool, how)(2)
    before = time.monotonic()
    for rank in survivors:
        pool.control(rank, break_group)
    ended = busy.outcomes(timeout=10, ranks=survivors)
    assert time.monotonic() - before < 1.0
    assert [ended[rank] for rank in survivors] == [Returned(value="True")] * 3
    pool.run(destroy, ranks=survivors)
    start(pool, next(new_generation), survivors)
    assert pool.run(total, PerRank([1.0, 2.0, 4.0]), ranks=survivors) == [7.0] * 3
    pool.run(destroy, ranks=survivors)
    pool.kill(2)
