"""Stop on request: at the next step boundary with a checkpoint, or at once on the second request.

The request outlives every phase. A group that breaks while it stops, or is only being formed when the request
comes, recovers first if more is committed than is saved: what is finished is kept wherever evidence of it is
left. Who has no time for that says so with a second request.
"""

from __future__ import annotations

from dataclasses import replace

from elastic_train.control.commands import Pause, Save
from elastic_train.control.ending import end
from elastic_train.control.events import StopRequested
from elastic_train.control.policy import Policy
from elastic_train.control.states import Attempt, Facts, Outcome, Pausing, Running, State
from elastic_train.control.storage_trouble import reported, rests, spent


def stop(state: State, event: StopRequested, policy: Policy) -> Outcome:
    facts, phase = state.facts, state.phase
    if facts.stopping is not None and event.patient:
        return Outcome(state=state, reason=f"the run is stopping: {facts.stopping}")
    if facts.stopping is not None:
        return end_stopped(state, f"{event.reason}, said again")
    state = replace(state, facts=replace(facts, stopping=event.reason))
    if isinstance(phase, Running | Pausing):
        return begin_stop(state, policy, event.at)
    if is_saved(facts):
        return end(state, "stopped", f"stopped on request: {event.reason}")
    return Outcome(
        state=state,
        reason=f"stopping as soon as step {facts.lineage.step} is recovered and saved: {event.reason}",
    )


def begin_stop(state: State, policy: Policy, at: float) -> Outcome:
    """Have a group stop at its next boundary, with a checkpoint."""
    facts, phase = state.facts, state.phase
    assert isinstance(phase, Running | Pausing)
    reason = facts.stopping or ""
    pausing = Pausing(plan=phase.plan, since=at, heard=at, purpose="stop", reason=reason, save=True)
    if isinstance(phase, Pausing):
        pausing = replace(pausing, settled=phase.settled)
    through = facts.lineage.step >= policy.max_steps
    return Outcome(
        state=replace(state, phase=pausing),
        commands=() if through else (Pause(generation=facts.lineage.generation, save=True),),
        reason=f"stopping at the next step boundary: {reason}",
    )


def try_stop(state: State, policy: Policy) -> Outcome:
    """End once the group stands still and its step is saved."""
    facts, phase = state.facts, state.phase
    assert isinstance(phase, Pausing)
    through = phase.broken or facts.lineage.step >= policy.max_steps
    if not through and len(phase.settled) < len(phase.plan.workers):
        return Outcome(state=state)
    return end_stopped(state, phase.reason) if is_saved(facts) else Outcome(state=state)


def save_again(state: State, policy: Policy, at: float) -> Outcome:
    """A group's checkpoint could not be written: it is tried again while trouble of storage is borne."""
    facts, phase = state.facts, state.phase
    assert isinstance(phase, Pausing)
    if phase.unsaved is None:
        return Outcome(state=state)
    if spent(facts.saves, policy):
        return end_stopped(state, f"{phase.reason}; {reported(facts.saves, at)}")
    if rests(facts.saves, at):
        return Outcome(state=state)
    return Outcome(
        state=replace(state, phase=replace(phase, unsaved=None, heard=at)),
        commands=(Save(generation=facts.lineage.generation),),
        reason=f"the checkpoint of step {facts.lineage.step} is tried again",
    )


def is_saved(facts: Facts) -> bool:
    """Whether nothing is committed that a checkpoint doesn't hold."""
    stored, step = facts.saves.stored, facts.lineage.step
    return step == 0 or (stored is not None and stored.step >= step)


def being_saved(facts: Facts) -> Attempt | None:
    """The newest step's checkpoint, once its commit was ordered."""
    return next((a for a in facts.saves.attempts if a.committing and a.step == facts.lineage.step), None)


def broken_while_stopping(state: State) -> Outcome:
    """The group is over, and its last checkpoint is whole: it only has to be committed."""
    phase = state.phase
    assert isinstance(phase, Pausing)
    return Outcome(
        state=replace(state, phase=replace(phase, broken=True)),
        reason="the checkpoint of the last step is being committed",
    )


def end_stopped(state: State, why: str) -> Outcome:
    facts = state.facts
    stored = facts.saves.stored
    kept = f"the checkpoint of step {stored.step} is kept" if stored else "nothing was saved"
    return end(state, facts.stops_as, f"stopped at step {facts.lineage.step}: {why}; {kept}")
