"""Which ranks get their state during the first step, and what the others compute of it."""

from __future__ import annotations

import pytest

from elastic_train.cluster.controller.form_group import late_ranks
from elastic_train.cluster.messages import Offer
from elastic_train.geometry.box import Box
from elastic_train.geometry.coverage import whole
from elastic_train.geometry.fragments import Fragments
from elastic_train.planner.plan import Mesh, Plan, even_shares
from elastic_train.planner.quotas import shares_without

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
