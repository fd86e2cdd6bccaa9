"""A break ends whatever a group waits in, and its processes form again."""

from __future__ import annotations

import time

import pytest

from elastic_train.planner.plan import Mesh
from elastic_train.testing.gloo_pool import GlooPool, PerRank, Returned
from tests.train.group_calls import (
    break_group,
    break_older,
    check_in_only,
    connect_to_self,
    destroy,
    has_reduced,
    is_connecting,
    is_forming,
    keep_as_older,
    receive_from_absent,
    reduce_forever,
    serve,
    start,
    talk_to_self,
    total,
    try_to_form,
    wait_in_subgroup,
    wait_until,
)

pytestmark = pytest.mark.ring2

ENDS_S = 60.0
"""What a break ends has ended by then, on any machine; without the break it would wait for `FORM_S`."""

PROMISED_S, TRIES = 1.0, 4
"""How long after a break survivors are back; a try in which the machine itself stood still is repeated."""


def broken_off(pool: GlooPool, generation: int, how: str, elements: int) -> float:
    """Lose process 2 amid all-reduces, break the others' group; the seconds until the last of them is out."""
    start(pool, generation, [0, 1, 2, 3])
    busy, survivors = pool.call_async(reduce_forever, elements), [0, 1, 3]
    wait_until(lambda: all(pool.control(rank, has_reduced) for rank in range(4)))
    getattr(pool, how)(2)
    before = time.monotonic()
    for rank in survivors:
        pool.control(rank, break_group)
    ended = busy.outcomes(ENDS_S, ranks=survivors)
    taken = time.monotonic() - before
    assert [ended[rank] for rank in survivors] == [Returned(value="True")] * 3
    return taken


@pytest.mark.parametrize("elements", [1 << 16, 1 << 22])
@pytest.mark.parametrize("how", ["kill", "stop"])
def test_survivors_of_a_lost_peer_unblock_within_a_second_of_the_break_and_form_again(
    pool: GlooPool, how: str, elements: int
) -> None:
    survivors = [0, 1, 3]
    taken = [broken_off(pool, next(pool.generations), how, elements)]
    while taken[-1] >= PROMISED_S and len(taken) < TRIES:
        pool.run(destroy, ranks=survivors)
        pool.kill(2)
        pool.restart(2)
        taken.append(broken_off(pool, next(pool.generations), how, elements))
    assert min(taken) < PROMISED_S, taken
    pool.run(destroy, ranks=survivors)
    start(pool, next(pool.generations), survivors)
    assert pool.run(total, PerRank([1.0, 2.0, 4.0]), ranks=survivors) == [7.0] * 3
    pool.run(destroy, ranks=survivors)
    pool.kill(2)


@pytest.mark.parametrize("operation", ["send", "recv"])
def test_a_message_of_which_a_part_is_under_way_ends_by_a_break(pool: GlooPool, operation: str) -> None:
    start(pool, next(pool.generations), [0, 1, 2])
    busy = pool.call_async(receive_from_absent, operation, ranks=[0, 1])
    wait_until(lambda: all(pool.control(rank, has_reduced) for rank in (0, 1)))
    for rank in (0, 1):
        pool.control(rank, break_group)
    assert busy.results(ENDS_S) == ["True"] * 2
    pool.run(destroy, ranks=[0, 1, 2])


def test_a_generation_whose_last_member_never_comes_ends_by_a_break(pool: GlooPool) -> None:
    store = (pool.store_host, pool.store_port)
    forming = pool.call_async(try_to_form, store, next(pool.generations), PerRank([0, 1]), 3, ranks=[0, 1])
    wait_until(lambda: all(pool.control(rank, is_forming) for rank in (0, 1)))
    for rank in (0, 1):
        pool.control(rank, break_group)
    assert forming.results(ENDS_S) == ["aborted while forming the group"] * 2
    start(pool, next(pool.generations), [0, 1, 2])
    assert pool.run(total, 1.0, ranks=[0, 1, 2]) == [3.0] * 3
    pool.run(destroy, ranks=[0, 1, 2])


@pytest.mark.parametrize("silent", [0, 2])
def test_a_member_that_hangs_while_connecting_does_not_hang_the_others_beyond_a_break(
    pool: GlooPool, silent: int
) -> None:
    store, generation = (pool.store_host, pool.store_port), next(pool.generations)
    others = [rank for rank in range(3) if rank != silent]
    pool.run(check_in_only, store, generation, silent, 3, ranks=[silent])
    forming = pool.call_async(try_to_form, store, generation, PerRank(others), 3, ranks=others)
    wait_until(lambda: all(pool.control(rank, is_connecting) for rank in others))
    for rank in others:
        pool.control(rank, break_group)
    assert forming.results(ENDS_S) == ["aborted while forming the group"] * 2


def test_a_member_whose_store_hangs_gives_it_up_after_a_break(pool: GlooPool) -> None:
    (port,) = pool.run(serve, ranks=[3])
    pool.stop(3)
    forming = pool.call_async(try_to_form, ("127.0.0.1", port), next(pool.generations), 0, 2, ranks=[0])
    wait_until(lambda: pool.control(0, is_forming))
    pool.control(0, break_group)
    assert forming.results(ENDS_S) == ["aborted while forming the group"]
    pool.kill(3)
    start(pool, next(pool.generations), [0, 1])
    assert pool.run(total, 1.0, ranks=[0, 1]) == [2.0] * 2
    pool.run(destroy, ranks=[0, 1])


def test_a_break_reaches_the_sub_groups_of_a_mesh(pool: GlooPool) -> None:
    start(pool, next(pool.generations), [0, 1, 2, 3])
    waiting = pool.call_async(wait_in_subgroup, Mesh(dp_replicate=2, dp_shard=2))
    wait_until(lambda: all(pool.control(rank, has_reduced) for rank in range(4)))
    assert waiting.results(ranks=[0, 2]) == ["absent"] * 2
    for rank in range(4):
        pool.control(rank, break_group)
    assert waiting.results(ENDS_S, ranks=[1, 3]) == ["True"] * 2
    pool.run(destroy)


def test_breaking_a_generation_leaves_later_ones_and_other_connections_alone(pool: GlooPool) -> None:
    start(pool, next(pool.generations), [0, 1])
    pool.run(connect_to_self, ranks=[0])
    pool.run(keep_as_older, ranks=[0, 1])
    start(pool, next(pool.generations), [1, 0])
    pool.run(break_older, ranks=[0, 1])
    assert pool.run(total, 1.0, ranks=[0, 1]) == [2.0] * 2
    pool.run(break_group, ranks=[0, 1])
    assert pool.run(talk_to_self, ranks=[0]) == [b"intact"]
    pool.run(destroy, ranks=[0, 1])
