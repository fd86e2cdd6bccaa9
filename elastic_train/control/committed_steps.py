"""Committed steps: what they prove, when control asks for a checkpoint, and the last one."""

from __future__ import annotations

from dataclasses import replace

from elastic_train.control.commands import Save
from elastic_train.control.events import StepCommitted
from elastic_train.control.incidents import progressed
from elastic_train.control.membership import proven
from elastic_train.control.not_finite import end_by_row, row_with, too_long
from elastic_train.control.policy import Policy
from elastic_train.control.schedule import Measured, explained, storage_is_due
from elastic_train.control.states import Facts, Outcome, Paced, Pausing, Running, State
from elastic_train.control.trouble import rests
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
    if event.step <= facts.reported:
        return _reported_again(state, event)
    facts = _noted(facts, event)
    said = f"step {event.step} is committed" + (", skipped: not finite" if event.skipped else "")
    if isinstance(phase, Pausing):
        return Outcome(state=replace(state, facts=facts, phase=replace(phase, heard=event.at)), reason=said)
    if not isinstance(phase, Running):
        return Outcome(state=replace(state, facts=facts), reason=said)
    if not phase.proven:
        facts = proven(facts, phase.plan.workers)
        phase = replace(phase, proven=True)
    elif facts.saving is None:  # nor the first step of a group, which is longer
        facts = replace(facts, paced=_paced(facts.paced, phase.plan, event.seconds))
    if facts.unfit is not None and too_long(facts.unfit, policy.not_finite):
        return end_by_row(State(facts=facts, phase=phase), facts.unfit)
    if event.step >= policy.max_steps:
        state = State(facts=facts, phase=replace(phase, final_since=event.at))
        return Outcome(state=state, reason=f"{said}, the last; its checkpoint is awaited")
    if _save_is_due(facts, policy, event.at):
        why = explained(measured(facts, policy, event.at), event.seconds)
        return Outcome(
            state=State(facts=asked(facts, event.at), phase=phase),
            commands=(Save(generation=facts.generation),),
            reason=f"{said}; a checkpoint is due, {why}",
            cadence=why,
        )
    return Outcome(state=State(facts=facts, phase=phase), reason=said)


def _reported_again(state: State, event: StepCommitted) -> Outcome:
    """A step that is known, by another worker, with metrics, or as the last one of the job's own loop."""
    facts, phase = state.facts, state.phase
    known, said = dict(facts.metrics), f"step {event.step} is known to be committed"
    before = dict(known.get(event.step, ()))
    if event.metrics and before and before != (merged := before | dict(event.metrics)):
        known[event.step] = tuple(merged.items())
        facts, said = replace(facts, metrics=tuple(known.items())), f"step {event.step} has metrics"
    if event.last and event.step == facts.step and facts.ended != event.step:
        facts, said = (
            replace(facts, ended=event.step),
            f"the job's own loop ended the run at step {event.step}",
        )
        if isinstance(phase, Running):
            phase = replace(phase, final_since=event.at)
    if facts is state.facts:
        return Outcome(state=state, reason=said)
    return Outcome(state=replace(state, facts=facts, phase=phase), reason=said)


def _noted(facts: Facts, event: StepCommitted) -> Facts:
    metrics = (("loss", event.loss), *event.metrics)
    facts = replace(
        facts,
        step=max(facts.step, event.step),
        ended=None if facts.ended is not None and event.step > facts.ended else facts.ended,
        reported=event.step,
        seen=(event.generation, Vote(step=event.step, values=event.vote)),
        metrics=(*facts.metrics[1 - METRICS_KEPT :], (event.step, metrics)),
        step_s=event.seconds,
        unfit=row_with(facts.unfit, event.step, skipped=event.skipped),
        **_paces(facts, event.seconds),
    )
    facts = progressed(facts, event.generation)
    if facts.restarts:
        facts = replace(facts, restarts=0)
    if event.step > facts.failed_step and facts.deterministic:
        return replace(facts, deterministic=())
    return facts


def _save_is_due(facts: Facts, policy: Policy, at: float) -> bool:
    if policy.checkpoints.every != "auto" or facts.began is None or facts.save_asked is None:
        return False
    if rests(facts, at):
        return False
    return storage_is_due(
        measured(facts, policy, at),
        asked_s=at - facts.save_asked,
        under_way=any(a.committing or a.generation == facts.generation for a in facts.attempts),
        progress_s=policy.timing.progress_s,
    )


def asked(facts: Facts, at: float) -> Facts:
    """The facts once a checkpoint was asked for: from now on its cost is measured."""
    return replace(facts, save_asked=at, saving=0.0)


def measured(facts: Facts, policy: Policy, at: float) -> Measured:
    return Measured(
        save_s=facts.save_s,
        cost_s=facts.save_cost_s,
        elapsed_s=at - facts.began if facts.began is not None else 0.0,
        failures=facts.uncovered if policy.peers else facts.failures_ever,
        peers=policy.peers,
    )


def _paced(known: tuple[Paced, ...], plan: Plan, seconds: float) -> tuple[Paced, ...]:
    """The paces of the run's kinds of plans with one more step under `plan`."""
    pace = StepPace(mesh=plan.mesh, schedule=plan.schedule, recompute=plan.recompute, step_s=seconds)
    before = next((p for p in known if replace(p.pace, step_s=seconds) == pace), None)
    if before is None:
        return (*known[1 - KINDS_KEPT :], Paced(pace=pace))
    step_s = before.pace.step_s
    now = Paced(pace=replace(pace, step_s=step_s + PACE * (seconds - step_s)), steps=before.steps + 1)
    return (*(p for p in known if p is not before), now)


def _paces(facts: Facts, seconds: float) -> dict[str, float]:
    """How long steps are while nothing is saved, and what they are longer while something is."""
    quiet = facts.quiet_step_s
    if facts.saving is None:
        return {"quiet_step_s": seconds if quiet is None else quiet + PACE * (seconds - quiet)}
    return {"saving": facts.saving + (max(seconds - quiet, 0.0) if quiet is not None else 0.0)}
