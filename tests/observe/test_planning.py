"""What `status` says of the plan."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from elastic_train.config import Batch, RunSpec
from elastic_train.control.fault_schedule import AddNode, FaultSchedule, KillNode, Moment
from elastic_train.observe.journal_records import planning
from elastic_train.planner.search import planner_for
from elastic_train.testing.simulator import Simulation, simulated_policy

pytestmark = pytest.mark.ring0


def test_the_planner_is_quoted_on_the_last_group_or_on_why_that_stays() -> None:
    batch = Batch(global_size=5, micro_size=1)
    spec = RunSpec(name="r", storage_path="/r", batch=batch, max_steps=1, min_workers=2, max_workers=4)
    schedule = FaultSchedule(
        faults=(KillNode(when=Moment(step=4), node="c"), AddNode(when=Moment(step=8), node="e")), seed=1
    )
    policy = replace(simulated_policy(max_steps=40), plan=planner_for(spec))
    simulation = Simulation(policy=policy, schedule=schedule, records=[])
    simulation.run()
    records = simulation.records
    assert records is not None
    assert planning(records[:1]) == ""
    first = next(i for i, record in enumerate(records) if record.formed)
    assert planning(records[: first + 1]).startswith("dp_replicate 4 on 4 of 4 workers: each worker holds")
    # Three and four workers run two rounds of five micro-batches: the fourth saves none.
    told = planning(records)
    assert re.match(r"dp_replicate 3 stays: dp_replicate 4 promises [\d.]+% less, a change takes", told), told
