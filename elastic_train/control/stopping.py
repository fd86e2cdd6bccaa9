"""Stopping on request: at the next step boundary with a checkpoint, at the second request at once."""

from __future__ import annotations

from dataclasses import replace

from elastic_train.control.commands import Pause
from elastic_train.control.ending import end
from elastic_train.control.events import StopRequested
from elastic_train.control.policy import Policy
from elastic_train.control.states import Outcome, Pausing, Running, State


def stop(state: State, event: StopRequested, policy: Policy) -> Outcome:
    phase = state.phase
    stopping = isinstance(phase, Pausing) and phase.purpose == "stop"
    if stopping or not isinstance(phase, Running | Pausing):
        return end(state, "stopped", f"stopped on request: {event.reason}")
    through = state.facts.step >= policy.max_steps
    pausing = Pausing(plan=phase.plan, since=event.at, purpose="stop", reason=event.reason, save=True)
    if isinstance(phase, Pausing):
        pausing = replace(pausing, settled=phase.settled)
    return Outcome(
        state=replace(state, phase=pausing),
        commands=() if through else (Pause(generation=state.facts.generation, save=True),),
        reason=f"stopping at the next step boundary: {event.reason}",
    )


def try_stop(state: State, policy: Policy) -> Outcome:
    """End once the group stands still and its step is saved, or can't be."""
    facts, phase = state.facts, state.phase
    assert isinstance(phase, Pausing)
    through = facts.step >= policy.max_steps
    if not through and set(phase.settled) != set(phase.plan.workers):
        return Outcome(state=state)
    saved = facts.step == 0 or (facts.stored is not None and facts.stored.step >= facts.step)
    return end_stopped(state, phase.reason) if saved or phase.unsaved else Outcome(state=state)


def broken_while_stopping(state: State, why: str) -> Outcome:
    """No checkpoint can be asked for any more; one that is whole may still be committed."""
    facts, phase = state.facts, state.phase
    assert isinstance(phase, Pausing)
    if any(a.committing and a.step == facts.step for a in facts.attempts):
        return Outcome(
            state=replace(state, phase=replace(phase, settled=phase.plan.workers)),
            reason="the checkpoint of the last step is being committed",
        )
    return end_stopped(state, why)


def end_stopped(state: State, why: str) -> Outcome:
    facts = state.facts
    stored = f"the checkpoint of step {facts.stored.step} is kept" if facts.stored else "nothing was saved"
    return end(state, "stopped", f"stopped at step {facts.step}: {why}; {stored}")
