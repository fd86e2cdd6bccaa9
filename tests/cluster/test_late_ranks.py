"""Which ranks get their state during the first step, and what the others compute of it."""

from __future__ import annotations

import pytest

from elastic_train.cluster.controller.first_step import computed_by, late_ranks
from elastic_train.cluster.messages import Offer
from elastic_train.geometry.box import Box
from elastic_train.geometry.coverage import whole
from elastic_train.geometry.fragments import Fragments
from elastic_train.planner.plan import Mesh, Plan, even_shares
from elastic_train.planner.quotas import shares_left, shares_without

pytestmark = pytest.mark.ring0

EVERYTHING = Fragments.of((name, "param", "float32", (4, 2), Box((0, 0), (4, 2))) for name in ("a", "b"))
HALF = Fragments.of((name, "param", "float32", (4, 2), Box((0, 0), (2, 2))) for name in ("a", "b"))


def offer(holds: Fragments = EVERYTHING, *, steady: bool = True, undone: tuple[str, ...] = ()) -> Offer:
    return Offer(holds=holds, document={}, steady=steady, undone=frozenset(undone))


def plan(**axes: int) -> Plan:
    mesh = Mesh(**axes)
    names = tuple(f"w{rank}" for rank in range(mesh.size))
    return Plan(mesh=mesh, workers=names, nodes=names, shares=even_shares(8, mesh.dp))


@pytest.mark.parametrize(
    ("mesh", "offers", "late"),
    [
        ({"dp_replicate": 3}, {0: offer(), 1: offer()}, {2}),
        ({"dp_replicate": 3}, {2: offer()}, {0, 1}),
        ({"dp_replicate": 3}, {0: offer(), 1: offer(HALF)}, {1, 2}),
        ({"dp_replicate": 3}, {0: offer(), 1: offer(undone=("a",))}, {1, 2}),
        ({"dp_replicate": 3}, {0: offer(steady=False), 1: offer(steady=False)}, set()),
        ({"dp_replicate": 2}, {0: offer(HALF), 1: offer(HALF)}, set()),
        ({"dp_replicate": 2}, {0: offer(), 1: offer()}, set()),
        ({"dp_replicate": 2}, {}, set()),
        ({"dp_shard": 3}, {0: offer(), 1: offer()}, set()),
        ({"dp_replicate": 2, "dp_shard": 2}, {0: offer(), 1: offer()}, set()),
        ({"dp_replicate": 2, "tp": 2}, {0: offer(), 1: offer()}, set()),
    ],
)
def test_who_holds_everything_computes_the_first_step_while_the_others_are_given_it(
    mesh: dict[str, int], offers: dict[int, Offer], late: set[int]
) -> None:
    holders = list(offers)
    same = {rank: holders.index(rank) for rank in holders}
    assert late_ranks(plan(**mesh), whole(EVERYTHING), list(offers.values()), same) == late


@pytest.mark.parametrize(
    ("shares", "absent", "counts"),
    [
        (even_shares(12, 3), {2}, (6, 6, 0)),
        (even_shares(12, 4), {0, 3}, (0, 6, 6, 0)),
        (((0, 1), (2, 3, 4, 5), (6, 7, 8)), {2}, (3, 6, 0)),
        (even_shares(2, 3), {0}, (0, 1, 1)),
        (even_shares(5, 3), {0, 1}, (0, 0, 5)),
    ],
)
def test_every_micro_batch_of_the_first_step_is_computed_once(
    shares: tuple[tuple[int, ...], ...], absent: set[int], counts: tuple[int, ...]
) -> None:
    found = shares_without(shares, absent)
    assert tuple(map(len, found)) == counts
    assert [i for share in found for i in share] == list(range(sum(map(len, shares))))


@pytest.mark.parametrize(
    ("mesh", "late", "there"),
    [
        ({"dp_replicate": 3}, set(), {0: (0, 1), 2: (5,)}),
        ({"dp_replicate": 3}, {2}, {0: (0, 1)}),
        ({"dp_shard": 3}, set(), {}),
        ({"dp_replicate": 2, "pp": 2}, set(), {}),
    ],
)
def test_what_is_computed_counts_where_each_rank_holds_the_whole_model_and_has_a_part_in_the_step(
    mesh: dict[str, int], late: set[int], there: dict[int, tuple[int, ...]]
) -> None:
    offers = [Offer(holds=EVERYTHING, document={}, computed=found) for found in ((0, 1), (), (5,))]
    assert computed_by(plan(**mesh), offers, {0: 0, 1: 1, 2: 2}, late) == there


@pytest.mark.parametrize(
    ("shares", "computed", "absent", "left"),
    [
        # everybody goes on with what it had begun
        (((0, 1, 2), (3, 4, 5)), {0: (0, 1), 1: (3,)}, set(), ((2,), (4, 5))),
        (((0, 1, 2), (3, 4, 5)), {0: (0, 1, 2), 1: (3, 4, 5)}, set(), ((), ())),
        # rank 1 of 3 is gone, and shares are others
        (((0, 1, 2), (3, 4, 5)), {0: (0, 1), 1: (4, 5)}, set(), ((2,), (3,))),
        # a newcomer has no state yet
        (((0, 1), (2, 3), (4, 5)), {0: (0, 1), 1: (2,)}, {2}, ((3, 4), (5,), ())),
        # one of them is twice as fast
        (((0, 1, 2, 3), (4, 5), (6, 7)), {0: (0,), 1: (4,)}, {2}, ((1, 2, 3, 5), (6, 7), ())),
        # fewer are left than there are ranks
        (((0, 1), (2, 3), (4, 5)), {0: (0, 1, 2), 1: (3, 4)}, set(), ((), (), (5,))),
    ],
)
def test_every_micro_batch_that_is_left_is_computed_once(
    shares: tuple[tuple[int, ...], ...],
    computed: dict[int, tuple[int, ...]],
    absent: set[int],
    left: tuple[tuple[int, ...], ...],
) -> None:
    found = shares_left(shares, computed, absent)
    assert sorted(map(len, found)) == sorted(map(len, left))
    assert found == left or absent or any(set(ids) - set(shares[i]) for i, ids in computed.items())
    everything = sorted(i for share in shares for i in share)
    assert sorted([*(i for part in found for i in part), *(i for ids in computed.values() for i in ids)]) == (
        everything
    )
    assert all(not found[index] for index in absent)
