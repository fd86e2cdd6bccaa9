"""Resend Go and Pause to a group that shows no effect of them: a call may be lost on its way.

Going and pausing are idempotent. A group that never begins is over in the end.
"""

from __future__ import annotations

from dataclasses import replace

from elastic_train.control.commands import Go, Pause
from elastic_train.control.events import Cause
from elastic_train.control.failure import break_group
from elastic_train.control.policy import Policy
from elastic_train.control.states import Facts, Outcome, Pausing, Running, State


def again_at(phase: Running | Pausing, policy: Policy) -> float:
    """When it is told again: later each time."""
    return phase.since + policy.timing.settle_s * (2.0**phase.told - 1.0)


def begun_by(phase: Running, policy: Policy, moved: float) -> float:
    """By when a group has committed its first step, or was seen to move: a stall inside a step is found
    before.
    """
    return max(phase.since, moved) + policy.timing.progress_s + policy.timing.settle_s


def has_to_begin(facts: Facts, phase: Running, policy: Policy) -> bool:
    return not phase.proven and facts.lineage.step < policy.max_steps


def begin(state: State, policy: Policy, at: float, moved: float) -> Outcome:
    """A group that was told to train and committed no step yet."""
    facts, phase = state.facts, state.phase
    assert isinstance(phase, Running)
    if at > begun_by(phase, policy, moved):
        detail = f"the group did not begin step {facts.lineage.step + 1}"
        return break_group(
            state, Cause(kind="silence", detail=detail, step=facts.lineage.step + 1), policy, at
        )
    if at > again_at(phase, policy):
        return Outcome(
            state=replace(state, phase=replace(phase, told=phase.told + 1)),
            commands=(Go(generation=facts.lineage.generation),),
            reason=f"generation {facts.lineage.generation} is told again to train",
        )
    return Outcome(state=state)


def pause(state: State, policy: Policy, at: float) -> Outcome:
    """A group that was asked to pause and of which nobody stands."""
    facts, phase = state.facts, state.phase
    assert isinstance(phase, Pausing)
    through = phase.broken or phase.settled or facts.lineage.step >= policy.max_steps
    if through or at <= again_at(phase, policy):
        return Outcome(state=state)
    return Outcome(
        state=replace(state, phase=replace(phase, told=phase.told + 1)),
        commands=(
            Go(generation=facts.lineage.generation),
            Pause(generation=facts.lineage.generation, save=phase.save),
        ),
        reason=f"generation {facts.lineage.generation} is asked again to pause",
    )
