"""Retry the checkpoint of the last step, without which a run has not finished.

While its group lives it is asked for again and again, for as long as trouble of storage is borne.
"""

from __future__ import annotations

from dataclasses import replace

from elastic_train.control.commands import Save
from elastic_train.control.ending import end
from elastic_train.control.events import Cause
from elastic_train.control.failure import break_group
from elastic_train.control.policy import Policy
from elastic_train.control.states import Facts, Outcome, Pausing, Running, State
from elastic_train.control.storage_trouble import again_at, reported, rests, spent, troubled


def heard(state: State, step: int, at: float, policy: Policy) -> State:
    """A part is durable: its group is writing."""
    phase = state.phase
    if isinstance(phase, Running) and step >= policy.max_steps:
        return replace(state, phase=replace(phase, final_since=at))
    if isinstance(phase, Pausing):
        return replace(state, phase=replace(phase, heard=at))
    return state


def is_missing(state: State, policy: Policy) -> bool:
    """Whether the last step is committed and neither saved nor about to be."""
    facts = state.facts
    return facts.lineage.step >= policy.max_steps and not any(
        a.committing and a.step >= policy.max_steps for a in facts.saves.attempts
    )


def silence_s(facts: Facts, policy: Policy) -> float:
    """For how long a group that writes a checkpoint may not be heard of, by what the last one took."""
    return max(policy.timing.progress_s, 3.0 * (facts.measured.save_s or 0.0))


def retry(state: State, policy: Policy, at: float, moved: float) -> Outcome:
    """Ask once more for the last checkpoint where it failed or fell silent; in the end give up.

    `moved` is when anybody of the group was last seen to move.
    """
    facts, phase = state.facts, state.phase
    assert isinstance(phase, Running)
    if not is_missing(state, policy):
        return Outcome(state=state)
    lost = set(phase.plan.workers) - {w.name for w in facts.membership.workers}
    if lost:  # while a whole checkpoint was on its way nobody was missed
        name = min(lost)
        detail = f"{name} is gone and the last checkpoint is not saved"
        return break_group(state, Cause(kind="death", detail=detail, worker=name), policy, at)
    quiet_s = at - max(phase.final_since, moved)
    silent = phase.final_failed is None and quiet_s > silence_s(facts, policy)
    if silent:
        said = f"nothing was heard for {quiet_s:.0f} s"
        facts = replace(facts, saves=troubled(facts.saves, said, policy, at, blocked=True))
    if spent(facts.saves, policy):
        return end(
            replace(state, facts=facts),
            "infrastructure",
            f"all {policy.max_steps} steps are committed and the last checkpoint could not be written in "
            f"{facts.saves.final_tries + 1} tries; {reported(facts.saves, at)}",
        )
    if not silent and (phase.final_failed is None or rests(facts.saves, at)):
        return Outcome(state=state)
    return Outcome(
        state=State(
            facts=replace(facts, saves=replace(facts.saves, final_tries=facts.saves.final_tries + 1)),
            phase=replace(phase, final_failed=None, final_since=at),
        ),
        commands=(Save(generation=facts.lineage.generation),),
        reason=f"try {facts.saves.final_tries + 2} for the last checkpoint",
    )


def due_at(state: State, phase: Running, policy: Policy, moved: float) -> float:
    """When something has to be done for the last checkpoint. `moved` is as for `retry`."""
    facts = state.facts
    if phase.final_failed is not None and facts.saves.trouble is not None:
        return again_at(facts.saves.trouble)
    return max(phase.final_since, moved) + silence_s(facts, policy)
