"""A storm of kills against a replicated plan: no committed step is lost."""

from __future__ import annotations

from itertools import pairwise

import pytest

from elastic_train.control.fault_schedule import (
    AddNode,
    FaultSchedule,
    KillController,
    KillNode,
    KillRank,
    Moment,
)
from tests.faults.conftest import Runs, assert_same_training

pytestmark = [pytest.mark.ring4, pytest.mark.timeout(600)]
NODES, CPUS = 3, 2
STEPS = 36

STORM = FaultSchedule(
    faults=(
        KillRank(when=Moment(step=3, phase="forward"), rank=0),
        KillRank(when=Moment(step=4, phase="forming"), rank=1),
        KillRank(when=Moment(step=8, phase="backward", micro_batch=1), rank=1),
        KillRank(when=Moment(step=12, phase="reduce"), rank=0),
        KillRank(when=Moment(step=16, phase="vote"), rank=1),
        KillController(when=Moment(step=18)),
        KillRank(when=Moment(step=21, phase="optimizer"), rank=0),
        KillRank(when=Moment(step=25, phase="save"), rank=1),
        KillNode(when=Moment(step=29, phase="backward"), node="n1"),
        AddNode(when=Moment(step=31), node="n3", slots=2),
    ),
    seed=0,
)


def test_no_kill_of_a_replica_costs_a_committed_step(runs: Runs) -> None:
    calm = runs.calm(steps=STEPS)
    rough = runs.disturbed("storm", STORM, max_steps=STEPS, standby=3)
    print(rough.summary)
    assert_same_training(rough, calm)
    assert rough.ledger.superseded == ()
    assert sum(r.formed is not None for r in rough.records) > 5, "the kills were felt"
    assert rough.checkpoint is not None
    # A worker's name is never used again: who leaves a group is one of those that were killed.
    groups = [set(r.formed.workers) for r in rough.records if r.formed is not None]
    left = sum(len(before - after) for before, after in pairwise(groups))
    ranks = sum(isinstance(fault, KillRank) for fault in STORM.faults)
    assert left <= ranks + CPUS, "survivors keep their processes and their ranks"
