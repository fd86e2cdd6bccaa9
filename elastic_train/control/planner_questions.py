"""Build planner questions: worker slots, the plan whose shards are held, and measured costs of a change.

Where a group trains, a change costs its switch and staying costs nothing. Where there is none, every plan
costs a switch, so bytes and throughput decide.
"""

from __future__ import annotations

import math
from dataclasses import replace

from elastic_train.control.committed_steps import interval_inputs
from elastic_train.control.membership import worker_slots
from elastic_train.control.policy import Policy
from elastic_train.control.schedule import interval_s, mtbf_s
from elastic_train.control.states import Facts, Measurements, Running
from elastic_train.control.switch_cost import expected_s
from elastic_train.planner.goodput_model import Outlook, StepPace
from elastic_train.planner.plan import Plan
from elastic_train.planner.question import Question

STEPS_THAT_TELL = 5
"""From which the mean of steps under a plan tells how fast it is."""

TELLING = 1 << 20
"""Bytes from which the time of a transfer tells how fast bytes come."""


def last_plan(facts: Facts) -> Plan | None:
    return facts.lineage.plans[-1][1] if facts.lineage.plans else None


def held(facts: Facts) -> Plan | None:
    """The newest plan that workers without a group hold shards of."""
    newest = max((h.generation for _, held in facts.survived.local_states for h in held), default=0)
    return dict(facts.lineage.plans).get(newest)


def to_form(facts: Facts, shards: Plan | None, policy: Policy, at: float) -> Question:
    """Which plan to form, where no group trains; `shards` is the plan whose shards are held."""
    return Question(
        worker_slots=worker_slots(facts, last_plan(facts)),
        most=policy.max_workers,
        held=shards,
        outlook=Outlook(
            quiet_s=_quiet_s(facts.measured, at),
            bytes_per_s=_bytes_per_s(facts.measured),
            lost_s=_lost_s(facts, policy, at),
            hysteresis=0.0,
            paces=_paces(facts.measured),
        ),
        exceeded=tuple(plan for plan, _ in facts.failures.exceeded),
    )


def to_change(facts: Facts, phase: Running, policy: Policy, at: float) -> Question:
    """Which plan to go over to from one that trains, or to stay with."""
    measured = facts.measured
    step_s = measured.step_s if phase.proven else 0.0
    left, rate = (policy.max_steps - facts.lineage.step) * step_s, _bytes_per_s(facts.measured)
    return Question(
        worker_slots=worker_slots(facts, phase.plan),
        most=policy.max_workers,
        held=phase.plan,
        outlook=Outlook(
            quiet_s=_quiet_s(facts.measured, at),
            left_s=_coarse(left) if left else math.inf,
            form_s=_coarse(
                expected_s(measured) if rate is None else max(expected_s(measured) - measured.transfer_s, 0.0)
            ),
            bytes_per_s=rate,
            lost_s=_lost_s(facts, policy, at),
            paces=_paces(facts.measured),
        ),
        exceeded=tuple(plan for plan, _ in facts.failures.exceeded),
    )


def _quiet_s(measured: Measurements, at: float) -> float:
    """Seconds between two changes of the group, as observed."""
    elapsed = at - measured.began if measured.began is not None else 0.0
    return _coarse(mtbf_s(elapsed_s=elapsed, failures=measured.reconfigurations))


def _bytes_per_s(measured: Measurements) -> float | None:
    """What a worker received when the last group formed; None where it was too little to tell."""
    if measured.moving_bytes < TELLING or measured.transfer_s <= 0.0:
        return None
    return _coarse(measured.moving_bytes / measured.transfer_s)


def _paces(measured: Measurements) -> tuple[StepPace, ...]:
    """What steps took under the kinds of plans that ran long enough; one alone says nothing of others."""
    reported = [p.pace for p in measured.paced if p.steps >= STEPS_THAT_TELL]
    reported.sort(key=str)
    return tuple(replace(pace, step_s=_coarse(pace.step_s)) for pace in reported) if len(reported) > 1 else ()


def _lost_s(facts: Facts, policy: Policy, at: float) -> float:
    """Work that goes with a part of which there is no copy: half of what lies between two saves."""
    if facts.measured.peer_memory:
        return _coarse(max(h.every for h in facts.measured.peer_memory) * facts.measured.step_s / 2)
    every = policy.checkpoints.every
    if not isinstance(every, int):
        return _coarse(interval_s(interval_inputs(facts, policy, at)) / 2)
    return _coarse(every * facts.measured.step_s / 2)


def _coarse(value: float) -> float:
    """To a tenth or so: a question is asked again in the same words while little changes."""
    return 2.0 ** (round(4 * math.log2(value)) / 4) if value > 0.0 else 0.0
