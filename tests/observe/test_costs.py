"""What steps and switches took stands beside what they were expected to take."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from elastic_train.control.events import StepCommitted
from elastic_train.control.fault_schedule import AddNode, DrainNode, FaultSchedule, Moment
from elastic_train.control.states import Measurements, Paced
from elastic_train.control.switch_cost import expected_step_s
from elastic_train.observe.costs import Costs
from elastic_train.observe.journal_records import Record, from_json, to_json
from elastic_train.observe.run_summary import encode_summary, summary_of
from elastic_train.planner.goodput_model import StepPace
from elastic_train.planner.plan import Mesh, Plan, even_shares
from elastic_train.testing.simulator import Simulation, simulated_policy

pytestmark = pytest.mark.ring0
SWITCH = re.compile(r"the switch took (\S+) s beside it, (\S+) s were expected")


def journal() -> list[Record]:
    """Of a run that grows by a node and leaves another one."""
    simulation = Simulation(
        policy=simulated_policy(replicas=2, max_steps=60, every=10),
        schedule=FaultSchedule(
            faults=(
                AddNode(when=Moment(step=5), node="d"),
                DrainNode(when=Moment(step=40), node="a", notice_s=60.0),
            ),
            seed=0,
        ),
        nodes=tuple("abc"),
        records=[],
    )
    simulation.run()
    assert simulation.records is not None
    return simulation.records


def test_the_journal_tells_what_a_switch_and_steps_took_beside_what_was_expected() -> None:
    records = [from_json(to_json(record)) for record in journal()]
    said = [found.groups() for record in records if (found := SWITCH.search(record.reason))]
    assert said, "a switch happened"
    told = summary_of(records)
    costs = told.costs
    assert costs.switch is not None
    took, expected = map(float, said[-1])
    assert costs.switch.expected_s == pytest.approx(expected, rel=0.1)
    assert costs.switch.took_s == pytest.approx(took, rel=0.1, abs=0.1)
    assert sum(pace.steps for pace in costs.paces.values()) == 60 - len(
        {record.formed.generation for record in records if record.formed is not None}
    ), "all but the first of each group"
    newest = list(costs.paces)[-1]
    formed = [record.formed for record in records if record.formed is not None]
    steps = [r.event.seconds for r in records if isinstance(r.event, StepCommitted)]
    assert formed[-1].mesh == newest
    assert min(steps) <= costs.paces[newest].mean_s <= max(steps)
    assert costs.paces[newest].expected_s is not None, "it is known from steps of the plan before"
    assert f"steps of {newest} take" in costs.words
    assert "were expected; the last switch took" in costs.words
    assert summary_of((), encode_summary(told)).costs == costs


def test_nothing_is_said_before_anything_was_measured() -> None:
    assert Costs().words == ""


def plan(dp: int) -> Plan:
    names = tuple(f"w{i}" for i in range(dp))
    return Plan(mesh=Mesh(dp_replicate=dp), workers=names, nodes=names, shares=even_shares(12, dp))


def test_a_step_is_expected_from_what_steps_of_the_plan_before_took() -> None:
    pace = StepPace(mesh=plan(2).mesh, schedule="1F1B", recompute="none", step_s=3.0)
    measured = Measurements(paced=(Paced(pace=pace, steps=9),))
    assert expected_step_s(measured, plan(2), plan(3), None) == pytest.approx(2.0), "four rounds, not six"
    known = replace(measured, planned_s=0.5)
    assert expected_step_s(known, plan(2), plan(3), 0.4) == pytest.approx(2.4), "the same times what was said"
    assert expected_step_s(measured, plan(2), plan(3), 0.4) == 0.4
    assert expected_step_s(known, plan(4), plan(3), 0.4) == 0.4, "of that plan nothing was measured"
    assert expected_step_s(Measurements(), None, plan(3), None) is None
