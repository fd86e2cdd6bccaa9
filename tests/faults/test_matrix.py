"""The whole matrix: every kind of fault at every phase, under plans over every axis.

Each storm is one run that suffers one fault at each phase in turn. A node that is slow hangs on to its run.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from elastic_train.cluster.actor_names import short
from elastic_train.cluster.faults.memory_exhaustion import why_not
from elastic_train.config import Parallelism
from elastic_train.control.events import Straggling, WorkerLost
from elastic_train.control.fault_schedule import (
    PHASES,
    BreakRank,
    ExhaustMemory,
    Fault,
    FaultSchedule,
    KillNode,
    KillRank,
    Moment,
    SlowNode,
    StopRank,
)
from tests.faults.conftest import WHOLE, Runs, assert_copies_and_logs_spare_every_step, assert_same_training

pytestmark = [pytest.mark.ring4, pytest.mark.matrix, pytest.mark.timeout(600)]
NODES, CPUS = 3, 2
STEPS = 40


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is asked for, with how many workers."""

    parallelism: Parallelism
    least: int
    ranks: int


PLANS = {
    "dp2": Plan(parallelism=Parallelism(dp_shard=1), least=1, ranks=2),
    "dp3": Plan(parallelism=Parallelism(dp_shard=1), least=1, ranks=3),
    "hsdp": Plan(parallelism=Parallelism(dp_shard=2), least=2, ranks=4),
    "fsdp": Plan(parallelism=Parallelism(dp_replicate=1, dp_shard=2), least=2, ranks=2),
    "fsdp4": Plan(parallelism=Parallelism(dp_replicate=1, dp_shard=4), least=4, ranks=4),
    "pp2": Plan(parallelism=Parallelism(pp=2, dp_shard=1, dp_replicate=1), least=2, ranks=2),
    "pp2dp2": Plan(parallelism=Parallelism(pp=2, dp_shard=1), least=2, ranks=4),
    "tp2pp2": Plan(parallelism=Parallelism(tp=2, pp=2), least=4, ranks=4),
}
KINDS = ("rank 0", "rank 1", "stopped", "node", "broken", "memory")
SLOW_S = 0.1
"""For each forward and backward, which take a tenth of it or less."""


def storm(kind: str, least: int) -> FaultSchedule:
    """One fault at each phase, five steps apart; saves are due at every fifth step.

    The one in forming strikes the group that comes after one of the two before it. Nodes are lost as long as
    the rest has room for the least workers.
    """
    lost = ("backward", "vote")[: NODES - -(-least // CPUS)]
    faults: list[Fault] = []
    for number, phase in enumerate(PHASES):
        step = 5 * number - 4 if phase == "forming" else 5 * (number + 1)
        when = Moment(step=step, phase=phase)
        match kind:
            case "node" if phase in lost:
                faults.append(KillNode(when=when, node=f"n{number % 3}"))
            case "stopped":
                faults.append(StopRank(when=when, rank=1, seconds=None))
            case "broken":
                faults.append(BreakRank(when=when, rank=1))
            case "memory":
                faults.append(ExhaustMemory(when=when, rank=1))
            case _:
                faults.append(KillRank(when=when, rank=1 if kind == "rank 1" else 0))
    return FaultSchedule(faults=tuple(faults), seed=0)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.replace(" ", ""))
def test_a_storm_leaves_the_losses_as_they_were(runs: Runs, plan: str, kind: str) -> None:
    if kind == "memory" and why_not():
        pytest.skip(why_not())
    chosen = PLANS[plan]
    while len(runs.cluster.nodes) < NODES:  # the storm before took some
        runs.cluster.add_node()
    rough = runs.disturbed(
        f"{plan}-{kind}".replace(" ", ""),
        storm(kind, chosen.least),
        workers=f"{chosen.least}:{chosen.ranks}",
        max_steps=STEPS,
        standby=NODES * CPUS - chosen.ranks,
        parallelism=chosen.parallelism,
    )
    assert_same_training(rough, runs.calm(steps=STEPS))
    assert_copies_and_logs_spare_every_step(rough)
    lost = [r.event.cause.kind for r in rough.records if isinstance(r.event, WorkerLost)]
    ended = {"broken": 0, "node": CPUS * (NODES - 1) + len(PHASES)}.get(kind, len(PHASES))
    assert len(lost) <= ended, "nobody ended whom no fault struck"
    if kind == "memory":
        assert set(lost) == {"memory"}, "the last heartbeat of each told how full its memory was"


@pytest.mark.parametrize("plan", PLANS)
def test_a_slow_node_is_named_where_its_ranks_compute_alone_and_ends_nowhere(runs: Runs, plan: str) -> None:
    chosen = PLANS[plan]
    while len(runs.cluster.nodes) < NODES:
        runs.cluster.add_node()
    rough = runs.disturbed(
        f"{plan}-slow",
        FaultSchedule(faults=(SlowNode(when=Moment(step=6), node="n1", seconds=SLOW_S),), seed=0),
        workers=f"{chosen.least}:{chosen.ranks}",
        max_steps=STEPS,
        standby=0,
        timing=WHOLE,
        parallelism=chosen.parallelism,
    )
    assert_same_training(rough, runs.calm(steps=STEPS))
    assert rough.ledger.superseded == ()
    assert len([r for r in rough.records if r.formed is not None]) == 1
    assert not any(isinstance(r.event, WorkerLost) for r in rough.records)
    (formed,) = [r.formed for r in rough.records if r.formed is not None]
    reported = {r.event.node for r in rough.records if isinstance(r.event, Straggling)}
    slow = {short(runs.cluster.nodes[1].node_id)} & set(formed.nodes)
    if plan == "pp2":  # a stage of one rank has nobody to be compared with
        slow = set()
    if plan in ("pp2dp2", "tp2pp2"):  # if both ranks of a stage are on it, neither is slower than the other
        assert reported <= slow
    else:
        assert reported == slow, "it is named, and no other"
