"""Sequences that are divided over workers go on through kills, from the copy that the others hold."""

from __future__ import annotations

import dataclasses

import pytest

from elastic_train.config import Parallelism
from elastic_train.control.fault_schedule import FaultSchedule, KillRank, Moment
from tests.faults.conftest import WHOLE, Runs

pytestmark = [pytest.mark.ring4, pytest.mark.matrix, pytest.mark.timeout(600)]
NODES, CPUS = 2, 2
STEPS = 14

STORM = FaultSchedule(
    faults=(
        KillRank(when=Moment(step=4, phase="backward"), rank=1),
        KillRank(when=Moment(step=9, phase="reduce"), rank=0),
    ),
    seed=0,
)


def test_a_rank_with_a_part_of_the_positions_is_lost_and_no_step_with_it(runs: Runs) -> None:
    task, spec = runs.spec(
        "context",
        workers="2:2",
        standby=1,
        max_steps=STEPS,
        parallelism=Parallelism(cp=2),
        timing=WHOLE,
    )
    rough = runs.compared(dataclasses.replace(task, seq_len=63), spec, STORM)  # a window has one token more
    assert rough.ledger.superseded == ()
    formed = [(r.formed.mesh, r.formed.source) for r in rough.records if r.formed is not None]
    assert formed == [("cp 2", "fresh"), ("cp 2", "live"), ("cp 2", "live")]
