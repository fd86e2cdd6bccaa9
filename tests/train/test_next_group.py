"""The next group is connected beside one that works, taken up without a meeting, or forgotten: no trace."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from elastic_train.errors import GroupBroken
from elastic_train.planner.plan import Mesh, Plan
from elastic_train.testing.gloo_pool import GlooPool, PerRank, PoolError
from elastic_train.train.collectives.process_group import groups_of
from elastic_train.train.next_group import NextGroup
from elastic_train.train.rank_assignment import RankAssignment
from tests.train.group_calls import (
    FORM_S,
    break_group,
    count_resources,
    destroy,
    shard_and_sum,
    start,
    total,
    wait_until,
)

pytestmark = pytest.mark.ring2

State = dict[str, Any]


def assignment(store: tuple[str, int], generation: int, rank: int, mesh: Mesh, number: int) -> RankAssignment:
    names = tuple(str(worker) for worker in range(mesh.size))
    plan = Plan(mesh=mesh, shares=((0,),) * mesh.size, workers=names, nodes=names)
    return RankAssignment(
        generation=generation,
        rank=rank,
        plan=plan,
        store_host=store[0],
        store_port=store[1],
        address="127.0.0.1",
        prepared=number,
    )


def connect(state: State, *of: Any) -> None:
    """Begin to connect, on a thread of its own; how it ended is `state["ended"]`."""
    state.setdefault("next", NextGroup())
    state["at"], state["ended"] = [], None

    def run() -> None:
        try:
            state["next"].connect(assignment(*of), "cpu", FORM_S, state["at"].append)
            state["ended"] = "connected"
        except GroupBroken as error:
            state["ended"] = error.reason

    state["thread"] = threading.Thread(target=run)
    state["thread"].start()


def ended(state: State) -> str | None:
    return state["ended"]


def at(state: State) -> list[str]:
    return state["at"]


def forget(state: State, *which: int) -> None:
    state.get("next", NextGroup()).forget(*which)


def take_up(state: State, *of: Any) -> None:
    if "group" in state:
        destroy(state)
    state["group"] = state["next"].take(assignment(*of))
    state["group"].form()


def reduce_until_asked(state: State) -> float:
    """All-reduces, to the one in which somebody was asked to stop; what each gave."""
    rounds = 0
    while True:
        mine = torch.tensor([1.0, float(state.get("asked", False))])
        dist.all_reduce(mine)
        assert mine[0] == dist.get_world_size()
        rounds += 1
        if mine[1]:
            return rounds


def total_alone(state: State, value: float) -> float:
    with state["group"].answering():
        return total(state, value)


def ask(state: State) -> None:
    state["asked"] = True


def mesh_sum(state: State, mesh: Mesh, axis: str) -> float:
    value = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(value, group=state["group"].mesh(mesh)[axis].get_group())
    return value.item()


def holds_key(state: State, store: tuple[str, int], generation: int, number: int, rank: int) -> bool:
    from elastic_train.train.collectives.tcp_store import store_client

    client = store_client(*store, check_alive=lambda: None, timeout_s=FORM_S)
    return client.check([f"generation/{generation}/prepared/{number}/member/{rank}"])


def test_groups_of_a_mesh_are_those_that_torch_makes() -> None:
    mesh = Mesh(dp_replicate=2, dp_shard=2)
    assert list(groups_of(mesh, 3)) == [(0, 1, 2, 3), (1, 3), (2, 3)]
    assert list(groups_of(Mesh(dp_replicate=3), 1)) == [(0, 1, 2), (0, 1, 2), (1,)]


def begin(pool: GlooPool, ranks: list[int], mesh: Mesh, generation: int, number: int = 1) -> None:
    """Each of these ranks of the next group begins to connect, whatever its main thread does."""
    for rank in ranks:
        pool.control(rank, connect, (pool.store_host, pool.store_port), generation, rank, mesh, number)


def wait_for(pool: GlooPool, ranks: list[int], outcome: str) -> None:
    wait_until(lambda: all(pool.control(rank, ended) is not None for rank in ranks))
    assert all(outcome in pool.control(rank, ended) for rank in ranks)


@pytest.mark.parametrize("mesh", [Mesh(dp_replicate=3), Mesh(dp_shard=3)], ids=str)
def test_three_go_over_to_a_group_that_was_connected_while_two_worked(pool: GlooPool, mesh: Mesh) -> None:
    store, first, second = (pool.store_host, pool.store_port), next(pool.generations), next(pool.generations)
    start(pool, first, [0, 1])
    working = pool.call_async(reduce_until_asked, ranks=[0, 1])
    begin(pool, [0, 1, 2], mesh, second)
    wait_for(pool, [0, 1, 2], "connected")
    assert pool.control(0, at) == ["listening", "announced", "met", "connected"]
    pool.control(0, ask)
    (rounds, again) = working.results()
    assert rounds == again
    pool.run(take_up, store, second, PerRank([0, 1, 2]), mesh, 1, ranks=[0, 1, 2])
    assert pool.run(total, 1.0, ranks=[0, 1, 2]) == [3.0] * 3
    if mesh.dp_shard > 1:
        assert pool.run(shard_and_sum, mesh, ranks=[0, 1, 2]) == [552.0] * 3
    else:
        assert pool.run(mesh_sum, mesh, "dp_replicate", ranks=[0, 1, 2]) == [3.0] * 3
    pool.run(destroy, ranks=[0, 1, 2])


def test_a_group_answers_itself_where_nobody_else_is_there(pool: GlooPool) -> None:
    store, generation, mesh = (pool.store_host, pool.store_port), next(pool.generations), Mesh(dp_replicate=3)
    begin(pool, [0, 1, 2], mesh, generation)
    wait_for(pool, [0, 1, 2], "connected")
    pool.run(take_up, store, generation, PerRank([0, 1, 2]), mesh, 1, ranks=[0, 1, 2])
    assert pool.run(total_alone, 5.0, ranks=[1]) == [5.0]
    assert pool.run(total, 1.0, ranks=[0, 1, 2]) == [3.0] * 3
    pool.run(destroy, ranks=[0, 1, 2])


def test_a_group_that_was_connected_ahead_is_broken_like_any(pool: GlooPool) -> None:
    store, generation, mesh = (pool.store_host, pool.store_port), next(pool.generations), Mesh(dp_replicate=3)
    begin(pool, [0, 1, 2], mesh, generation)
    wait_for(pool, [0, 1, 2], "connected")
    pool.run(take_up, store, generation, PerRank([0, 1, 2]), mesh, 1, ranks=[0, 1, 2])
    waiting = pool.call_async(total, 1.0, ranks=[0])
    pool.control(0, break_group)
    with pytest.raises(PoolError, match=r"aborted|closed|reset"):
        waiting.results()
    pool.run(destroy, ranks=[0, 1, 2])


@pytest.mark.parametrize("there", [[0, 1], [0, 1, 2]], ids=["one is missing", "all are connected"])
def test_what_is_forgotten_leaves_nothing_and_the_running_group_works_on(
    pool: GlooPool, there: list[int]
) -> None:
    store, first, second = (pool.store_host, pool.store_port), next(pool.generations), next(pool.generations)
    mesh = Mesh(dp_replicate=3)
    start(pool, first, [0, 1])
    working = pool.call_async(reduce_until_asked, ranks=[0, 1])
    before = pool.control(0, count_resources)
    for number in (1, 2, 3):
        begin(pool, there, mesh, second, number)
        if len(there) == 3:
            wait_for(pool, there, "connected")
        else:
            wait_until(lambda: "announced" in pool.control(0, at))
        for rank in there:
            pool.control(rank, forget, second, number)
        wait_until(lambda: all(pool.control(rank, ended) is not None for rank in there))
        for rank in there:
            assert not pool.run(holds_key, store, second, number, rank, ranks=[3])[0]

    def as_before() -> bool:
        now = pool.control(0, count_resources)
        return now[0] <= before[0] and now[1] <= before[1]

    wait_until(as_before)
    pool.control(1, ask)
    rounds, again = working.results()
    assert rounds == again
    assert pool.run(total, 2.0, ranks=[0, 1]) == [4.0, 4.0]
    pool.run(destroy, ranks=[0, 1])


def test_a_death_while_others_connect_costs_the_running_group_nothing(pool: GlooPool) -> None:
    first, second = next(pool.generations), next(pool.generations)
    start(pool, first, [0, 1])
    working = pool.call_async(reduce_until_asked, ranks=[0, 1])
    begin(pool, [0, 1], Mesh(dp_replicate=3), second)
    wait_until(lambda: "announced" in pool.control(1, at))
    pool.kill(2)
    for rank in (0, 1):
        pool.control(rank, forget)
    wait_for(pool, [0, 1], "aborted while")
    pool.control(0, ask)
    rounds, again = working.results()
    assert rounds == again
    pool.run(destroy, ranks=[0, 1])
