"""What the logs that are left allow to be replayed, and on whom."""

from __future__ import annotations

import pytest

from elastic_train.planner.plan import Mesh, Plan, even_shares
from elastic_train.recovery.evidence import Logged
from elastic_train.recovery.replayable_steps import Sent, logged, replayable
from elastic_train.recovery.substitute_plan import substitute

pytestmark = pytest.mark.ring0


def pipeline(pp: int, groups: tuple[tuple[int, int], ...] = (), **inner: int) -> Plan:
    """Stages of two blocks each, eight micro-batches."""
    mesh = Mesh(pp=pp, **inner)
    names = tuple(f"w{rank}" for rank in range(mesh.size))
    stages = tuple((2 * stage, 2 * stage + 2) for stage in range(pp))
    return Plan(
        mesh=mesh, workers=names, nodes=names, shares=even_shares(8, mesh.dp), stages=stages, groups=groups
    )


def sent_by(plan: Plan, *ranks: int, ties: tuple[tuple[int, int], ...] = ()) -> dict[str, tuple[Sent, ...]]:
    size = plan.mesh.size // plan.mesh.pp
    return {
        f"w{rank}": (Sent(generation=1, stage=rank // size, index=rank % size, first=1, last=5, ties=ties),)
        for rank in ranks
    }


def replayed(
    plan: Plan, *ranks: int, ties: tuple[tuple[int, int], ...] = ()
) -> dict[tuple[int, int], set[str]]:
    """Whom a replay of each range of stages reads from, where the workers of `ranks` are left."""
    return {log.stages: set(log.senders) for log in logged(sent_by(plan, *ranks, ties=ties), {1: plan}, ())}


def test_a_stage_can_be_replayed_where_all_its_neighbours_logs_meet() -> None:
    assert replayable(3, (1, 2), [(2, 9), (4, 12)]) == Logged(generation=3, stage=1, first=4, last=9)
    assert replayable(3, (1, 2), [(2, 3), (4, 12)]) is None
    assert replayable(3, (1, 2), [(2, 9), None]) is None
    assert replayable(3, (1, 2), []) is None


def test_what_workers_tell_gives_what_can_be_replayed_of_each_stage() -> None:
    """Three stages of which the middle one is lost; the last step's outcome is known elsewhere or nowhere."""
    reported = {
        "a": (Sent(generation=2, stage=0, first=3, last=8, ahead=True),),
        "c": (Sent(generation=2, stage=2, first=4, last=9),),
    }
    known = logged(reported, {2: pipeline(3)}, {(2, 9)})
    assert known == (Logged(generation=2, stage=1, first=4, last=9, senders=("a", "c")),)
    (unknown,) = logged(reported, {2: pipeline(3)}, ())
    assert unknown.last == 8
    assert logged({"a": reported["a"]}, {2: pipeline(3)}, ()) == (), "a neighbour's log is gone with it"
    assert logged(reported, {1: pipeline(3)}, ()) == (), "of a plan that is forgotten nothing is known"


def test_a_stage_that_shares_a_parameter_needs_that_log_too() -> None:
    ties = ((0, 3),)
    sent = {f"w{s}": (Sent(generation=1, stage=s, first=1, last=5, ties=ties),) for s in (1, 2)}
    assert [log.stage for log in logged(sent, {1: pipeline(4)}, ())] == []
    whole = sent | {"w3": (Sent(generation=1, stage=3, first=2, last=5, ties=ties),)}
    (log, *_) = logged(whole, {1: pipeline(4)}, ())
    assert (log.stage, log.first, log.senders) == (0, 2, ("w1", "w3"))


def test_a_stage_of_several_ranks_needs_the_logs_of_all_that_other_micro_batches_went_through() -> None:
    plan = pipeline(2, dp_shard=2)
    assert replayed(plan, 0, 1)[1, 2] == {"w0", "w1"}
    assert (1, 2) not in replayed(plan, 0, 2), "the other half of the micro-batches is gone"
    plan = pipeline(2, dp_replicate=2)
    assert (1, 2) not in replayed(plan, 0)


def test_of_tensor_parallel_neighbours_the_first_one_s_log_is_enough() -> None:
    plan = pipeline(2, tp=2)
    assert replayed(plan, 0)[1, 2] == {"w0"}
    assert (1, 2) not in replayed(plan, 1), "the one that kept it is gone"
    assert replayed(plan, 0, 1, ties=((0, 1),))[1, 2] == {"w0", "w1"}, "of a tie each has a shard"
    assert (1, 2) not in replayed(plan, 0, ties=((0, 1),))


def test_a_tie_is_read_from_any_replica() -> None:
    plan = pipeline(3, dp_replicate=2)
    found = replayed(plan, 2, 3, 5, ties=((0, 2),))
    assert found[0, 1] == {"w2", "w3", "w5"}


def test_of_a_group_only_its_ends_are_read() -> None:
    plan = pipeline(4, groups=((0, 1), (1, 3), (3, 4)))
    assert replayed(plan, 0, 3) == {(1, 3): {"w0", "w3"}}
    assert replayed(plan, 1, 2)[0, 1] == {"w1"}
    assert replayed(plan, 0, 3, ties=((1, 2),)) == {(1, 3): {"w0", "w3"}}, "a tie inside is nobody's to keep"


def test_idle_workers_stand_in_as_replicas_of_a_lost_stage() -> None:
    lost = pipeline(3)
    alone = substitute(lost, (1, 2), ["a"], exact=False)
    assert alone is not None
    assert (alone.plan.mesh, alone.plan.shares, alone.plan.stages) == (lost.mesh, lost.shares, lost.stages)
    assert alone.ranks == (1,)
    assert alone.substituted_ranks(0) == (1,)
    shared = substitute(lost, (1, 2), ["a", "b", "c"], exact=False)
    assert shared is not None
    assert shared.plan.shares == ((0, 1, 2), (3, 4, 5), (6, 7))
    assert [shared.plan.workers[rank] for rank in shared.ranks] == ["a", "b", "c"]
    assert [shared.substituted_ranks(n) for n in range(3)] == [(1,), (), ()], "the others only help"
    many = substitute(lost, (1, 2), [str(n) for n in range(12)], exact=False)
    assert many is not None
    assert len(many.ranks) == 8, "one for each micro-batch"


def test_the_ranks_of_a_stage_stand_in_together() -> None:
    lost = pipeline(2, dp_shard=2)
    assert substitute(lost, (1, 2), ["a"], exact=False) is None
    pair = substitute(lost, (1, 2), ["a", "b", "c"], exact=True)
    assert pair is not None
    assert pair.plan.mesh == lost.mesh
    assert pair.mesh == Mesh(dp_shard=2)
    assert [pair.substituted_ranks(n) for n in range(2)] == [(2,), (3,)]
    doubled = substitute(lost, (1, 2), ["a", "b", "c", "d"], exact=False)
    assert doubled is not None
    assert doubled.plan.mesh.dp_replicate == 2
    assert [doubled.substituted_ranks(n) for n in range(4)] == [(2,), (3,), (), ()]
    halved = substitute(pipeline(2, dp_replicate=2), (0, 1), ["a"], exact=False)
    assert halved is not None
    assert halved.plan.shares == (tuple(range(8)),)
    assert substitute(pipeline(2, dp_replicate=2), (0, 1), ["a"], exact=True) is None


def test_a_group_stands_in_as_one_stage() -> None:
    lost = pipeline(4, groups=((0, 1), (1, 3), (3, 4)))
    found = substitute(lost, (1, 3), ["a"], exact=False)
    assert found is not None
    assert found.plan.stages == ((0, 2), (2, 6), (6, 8))
    assert found.ranks == (1,)
    assert found.substituted_ranks(0) == (1, 2)
