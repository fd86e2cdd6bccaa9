"""Which workers replay which lost stage, and which ranks each of them brings back."""

from __future__ import annotations

import pytest

from elastic_train.cluster.stage_replays import StageReplay, stage_replays
from elastic_train.control.commands import Form
from elastic_train.planner.plan import Mesh, Plan, even_shares
from elastic_train.recovery.evidence import Logged, Mixed, Replay

pytestmark = pytest.mark.ring0


def plan(workers: str, *, pp: int, **inner: int) -> Plan:
    mesh = Mesh(pp=pp, **inner)
    return Plan(
        mesh=mesh,
        workers=tuple(workers),
        nodes=tuple(workers),
        shares=even_shares(8, mesh.dp),
        stages=tuple((n, n + 1) for n in range(pp)),
    )


def ordered(
    lost: Plan,
    then: Plan,
    holders: str,
    *gone: tuple[int, int],
    exact: bool = False,
    limit: int | None = None,
) -> list[list[StageReplay]]:
    """`gone` are the parts that nobody holds, one replay for each stage of them."""
    replays = tuple(
        Replay(
            log=Logged(generation=1, stage=stage, first=1, last=9),
            base=4,
            lost=tuple(part for part in gone if part[0] == stage),
            exact=exact,
        )
        for stage in sorted({stage for stage, _ in gone})
    )
    origin = Mixed(generation=1, step=9, replays=replays)
    command = Form(
        generation=2,
        plan=then,
        origin=origin,
        lineage=((1, 0), (2, 9)),
        holders=tuple(holders),
        replayed=lost,
    )
    return [list(together) for together in stage_replays(command, origin, limit)]


def test_the_newcomer_in_the_lost_ones_place_brings_it_back_and_survivors_help() -> None:
    [[stage_replay]] = ordered(plan("abc", pp=3), plan("adc", pp=3), "ac", (1, 0))
    assert stage_replay.workers == ("d", "a", "c")
    assert [stage_replay.ranks(n) for n in range(3)] == [(1,), (), ()]
    assert stage_replay.holders == ("d",)
    assert stage_replay.shared


def test_one_worker_is_enough_where_one_is_asked_for() -> None:
    [[stage_replay]] = ordered(plan("abc", pp=3), plan("adc", pp=3), "ac", (1, 0), limit=1)
    assert stage_replay.workers == ("d",)
    assert not stage_replay.shared


def test_without_a_newcomer_survivors_replay_by_themselves() -> None:
    [[stage_replay]] = ordered(plan("abc", pp=3), plan("ac", pp=2), "ac", (1, 0))
    assert stage_replay.workers == ("a", "c")
    assert stage_replay.holders == ("a",)


def test_two_stages_are_replayed_side_by_side_where_there_are_workers_for_both() -> None:
    [together] = ordered(plan("abcd", pp=4), plan("ebfd", pp=4), "bd", (0, 0), (2, 0))
    assert [set(stage_replay.workers) & {"b", "d"} for stage_replay in together] in (
        [{"b"}, {"d"}],
        [{"d"}, {"b"}],
    )
    assert not set(together[0].workers) & set(together[1].workers)


def test_too_few_workers_take_the_stages_in_turn() -> None:
    rounds = ordered(plan("abc", pp=3), plan("b", pp=1), "b", (0, 0), (2, 0))
    assert [[stage_replay.workers for stage_replay in together] for together in rounds] == [
        [("b",)],
        [("b",)],
    ]


def test_what_is_left_of_a_stage_helps_and_gives_nothing_new() -> None:
    lost = plan("abcd", pp=2, dp_shard=2)
    [[stage_replay]] = ordered(lost, plan("abce", pp=2, dp_shard=2), "abc", (1, 1), exact=True)
    assert stage_replay.workers == ("c", "e"), "each in its own place"
    assert [stage_replay.ranks(n) for n in range(2)] == [(), (3,)]
    assert stage_replay.holders == ("e",)
    assert not stage_replay.shared, "no share of the micro-batches is a helper's alone"


def test_a_stage_of_more_ranks_than_workers_is_not_replayed() -> None:
    assert ordered(plan("abcd", pp=2, dp_shard=2), plan("a", pp=1), "a", (1, 0), (1, 1)) == []
