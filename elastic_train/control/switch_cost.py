"""What a plan costs a run, as it is expected from what this run measured: a switch to it, and its steps.

What a switch costs: the seconds that it stands still, less those of the step done in them.

The next one is taken to cost what the last one took. Before the first, it is what forming the last group
took, with what its first step took beyond a usual one: too much rather than nothing.
"""

from __future__ import annotations

from dataclasses import replace

from elastic_train.control.states import Measurements
from elastic_train.planner.plan import Plan


def expected_s(measured: Measurements) -> float:
    """Seconds that the next switch is taken to cost."""
    if measured.switch_s > 0.0:
        return measured.switch_s
    return measured.formed_s + max(measured.first_s - measured.step_s, 0.0)


def expected_step_s(
    measured: Measurements, before: Plan | None, plan: Plan, planned_s: float | None
) -> float | None:
    """Seconds that a step of a plan is taken to last; None where nothing is known of it.

    `planned_s` is what the planner says by rates that nobody measured: it is scaled by what steps of the plan
    `before` took in times of what it said of them. Where it knows no layers a step lasts as long as the
    rounds of micro-batches that it has.
    """
    pace = next((p.pace.step_s for p in measured.paced[-1:]), None)
    known = before is not None and pace is not None and measured.paced[-1].pace.mesh == before.mesh
    if not known or before is None or pace is None:
        return planned_s
    if planned_s is not None and measured.planned_s:
        return pace * planned_s / measured.planned_s
    return pace * plan.rounds / before.rounds if planned_s is None else planned_s


def after_first_step(
    measured: Measurements, *, stood_s: float | None, usual_s: float, first_s: float
) -> tuple[Measurements, str]:
    """Once a group has committed its first step, and a sentence where it follows a switch.

    `stood_s` lie between the last step before the switch and this one, `usual_s` is what a step took before.
    """
    if stood_s is None:
        return replace(measured, first_s=first_s), ""
    switch_s, thought_s = max(stood_s - usual_s, 0.0), expected_s(measured)
    said = f"the switch took {switch_s:.2g} s beside it, {thought_s:.2g} s were expected"
    return replace(measured, first_s=first_s, switch_s=switch_s), said
