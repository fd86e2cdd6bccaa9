"""Handle committed steps: progress, pace measurements, and asking for a checkpoint that is due."""

from __future__ import annotations

from dataclasses import replace

from elastic_train.control.commands import Save
from elastic_train.control.events import StepCommitted
from elastic_train.control.incidents import progressed
from elastic_train.control.membership import proven
from elastic_train.control.not_finite import end_by_row, row_with, too_long
from elastic_train.control.policy import Policy
from elastic_train.control.schedule import IntervalInputs, explained, storage_is_due
from elastic_train.control.states import Facts, Measurements, Outcome, Paced, Pausing, Running, State
from elastic_train.control.storage_trouble import rests
from elastic_train.control.switch_cost import after_first_step
from elastic_train.planner.goodput_model import StepPace
from elastic_train.planner.plan import Plan
from elastic_train.recovery.evidence import Vote

PACE = 0.1
"""Weight of a new step in the mean of steps during which nothing is saved."""

KINDS_KEPT = 16
"""Kinds of plans of which a run knows how long steps were."""

METRICS_KEPT = 64
"""Steps whose metrics are kept for the checkpoint that may be on its way."""


def step_committed(state: State, event: StepCommitted, policy: Policy) -> Outcome:
    facts, phase = state.facts, state.phase
    if event.step <= facts.lineage.reported:
        return _reported_again(state, event)
    facts = _noted(facts, event)
    said = f"step {event.step} is committed" + (", skipped: not finite" if event.skipped else "")
    if isinstance(phase, Pausing):
        phase = replace(phase, heard=event.at, stands=event.at)
        return Outcome(state=replace(state, facts=facts, phase=phase), reason=said)
    if not isinstance(phase, Running):
        return Outcome(state=replace(state, facts=facts), reason=said)
    if not phase.proven:
        stood_s = None if phase.stands is None else event.at - phase.stands
        usual_s = state.facts.measured.step_s
        measured, switch = after_first_step(
            facts.measured, stood_s=stood_s, usual_s=usual_s, first_s=event.seconds
        )
        facts, said = replace(facts, measured=measured), f"{said}; {switch}" if switch else said
        facts = replace(facts, membership=proven(facts.membership, phase.plan.workers))
        phase = replace(phase, proven=True)
    elif facts.measured.saving_s is None:  # nor the first step of a group, which is longer
        facts = replace(facts, measured=_paced(facts.measured, phase.plan, event.seconds))
    row = facts.failures.not_finite
    if row is not None and too_long(row, policy.not_finite):
        return end_by_row(State(facts=facts, phase=phase), row)
    if event.step >= policy.max_steps:
        state = State(facts=facts, phase=replace(phase, final_since=event.at))
        return Outcome(state=state, reason=f"{said}, the last; its checkpoint is awaited")
    if _save_is_due(facts, policy, event.at):
        why = explained(interval_inputs(facts, policy, event.at), event.seconds)
        return Outcome(
            state=State(facts=asked(facts, event.at), phase=phase),
            commands=(Save(generation=facts.lineage.generation),),
            reason=f"{said}; a checkpoint is due, {why}",
            cadence=why,
        )
    return Outcome(state=State(facts=facts, phase=phase), reason=said)


def _reported_again(state: State, event: StepCommitted) -> Outcome:
    """A step that is known, by another worker, with metrics, or as the last one of the job's own loop."""
    facts, phase = state.facts, state.phase
    known, said = dict(facts.saves.metrics), f"step {event.step} is known to be committed"
    before = dict(known.get(event.step, ()))
    if event.metrics and before and before != (merged := before | dict(event.metrics)):
        known[event.step] = tuple(merged.items())
        facts = replace(facts, saves=replace(facts.saves, metrics=tuple(known.items())))
        said = f"step {event.step} has metrics"
    if event.last and event.step == facts.lineage.step and facts.lineage.ended != event.step:
        facts = replace(facts, lineage=replace(facts.lineage, ended=event.step))
        said = f"the job's own loop ended the run at step {event.step}"
        if isinstance(phase, Running):
            phase = replace(phase, final_since=event.at)
    if facts is state.facts:
        return Outcome(state=state, reason=said)
    return Outcome(state=replace(state, facts=facts, phase=phase), reason=said)


def _noted(facts: Facts, event: StepCommitted) -> Facts:
    lineage, saves, failures = facts.lineage, facts.saves, facts.failures
    metrics = (("loss", event.loss), *event.metrics)
    partial = failures.partial == (event.generation, event.step)
    return replace(
        facts,
        lineage=replace(
            lineage,
            step=max(lineage.step, event.step),
            ended=None if lineage.ended is not None and event.step > lineage.ended else lineage.ended,
            reported=event.step,
            seen=(event.generation, Vote(step=event.step, values=event.vote)),
        ),
        saves=replace(saves, metrics=(*saves.metrics[1 - METRICS_KEPT :], (event.step, metrics))),
        measured=_timed(facts.measured, event.seconds),
        failures=replace(
            progressed(failures, event.generation, event.step),
            not_finite=row_with(failures.not_finite, event.step, skipped=event.skipped),
            restarts=0,
            deterministic=failures.deterministic if partial or event.step <= failures.last_step else (),
        ),
    )


def _save_is_due(facts: Facts, policy: Policy, at: float) -> bool:
    if policy.checkpoints.every != "auto" or facts.measured.began is None or facts.saves.asked is None:
        return False
    if rests(facts.saves, at):
        return False
    newest = facts.lineage.generation
    return storage_is_due(
        interval_inputs(facts, policy, at),
        asked_s=at - facts.saves.asked,
        under_way=any(a.committing or a.generation == newest for a in facts.saves.attempts),
        progress_s=policy.timing.progress_s,
    )


def asked(facts: Facts, at: float) -> Facts:
    """The facts once a checkpoint was asked for: from now on its cost is measured."""
    return replace(
        facts, saves=replace(facts.saves, asked=at), measured=replace(facts.measured, saving_s=0.0)
    )


def interval_inputs(facts: Facts, policy: Policy, at: float) -> IntervalInputs:
    """What the time between two checkpoints follows from, as this run measured it."""
    measured = facts.measured
    return IntervalInputs(
        save_s=measured.save_s,
        cost_s=measured.save_cost_s,
        elapsed_s=at - measured.began if measured.began is not None else 0.0,
        failures=facts.failures.uncovered if policy.peers else facts.failures.ever,
        peers=policy.peers,
    )


def _paced(measured: Measurements, plan: Plan, seconds: float) -> Measurements:
    """The measurements with one more step under `plan`."""
    known = measured.paced
    pace = StepPace(mesh=plan.mesh, schedule=plan.schedule, recompute=plan.recompute, step_s=seconds)
    before = next((p for p in known if replace(p.pace, step_s=seconds) == pace), None)
    if before is None:
        return replace(measured, paced=(*known[1 - KINDS_KEPT :], Paced(pace=pace)))
    step_s = before.pace.step_s
    now = Paced(pace=replace(pace, step_s=step_s + PACE * (seconds - step_s)), steps=before.steps + 1)
    return replace(measured, paced=(*(p for p in known if p is not before), now))


def _timed(measured: Measurements, seconds: float) -> Measurements:
    """The last step's time: it tells how long steps are while nothing is saved, or what a save costs."""
    quiet, saving_s = measured.quiet_step_s, measured.saving_s
    if saving_s is None:
        quiet = seconds if quiet is None else quiet + PACE * (seconds - quiet)
    elif quiet is not None:
        saving_s += max(seconds - quiet, 0.0)
    return replace(measured, step_s=seconds, quiet_step_s=quiet, saving_s=saving_s)
