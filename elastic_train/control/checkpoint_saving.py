"""Checkpoints on their way: parts, commits, retention, and the one that has to succeed, the last.

A checkpoint is whole when every rank of its generation's plan wrote its part. Parts count as long as their
step belongs to the lineage, even if their group is over by then: what is durable is durable. A save that
fails costs nothing but itself; training goes on.
"""

from __future__ import annotations

import math
from dataclasses import replace

from elastic_train.control.commands import Command, Commit, Forget, Prune, Save
from elastic_train.control.ending import end
from elastic_train.control.events import (
    Cause,
    CheckpointCommitted,
    CheckpointRejected,
    PartWritten,
    PeersHeld,
    SaveFailed,
    SaveRequested,
)
from elastic_train.control.failure import break_group
from elastic_train.control.policy import Policy
from elastic_train.control.retention import kept_slots
from elastic_train.control.states import (
    Attempt,
    Commitment,
    Facts,
    Forming,
    Outcome,
    Pausing,
    Running,
    State,
)
from elastic_train.recovery.evidence import Stored, checkpoint_of
from elastic_train.recovery.lineage import alive

BACK_OFF_S = 5.0


def part_written(state: State, event: PartWritten, policy: Policy) -> Outcome:
    facts = state.facts
    plan = dict(facts.plans).get(event.generation)
    name = f"step {event.step} of generation {event.generation}"
    if plan is None or not alive(facts.lineage, event.generation, event.step):
        return Outcome(state=state, reason=f"fenced: {name} does not belong to the lineage")
    attempt = _find(facts, event.generation, event.step) or Attempt(
        generation=event.generation, step=event.step
    )
    newer = any((a.step, a.generation) > (event.step, event.generation) for a in facts.attempts)
    stored = facts.stored is not None and facts.stored.step >= event.step
    if newer or stored or attempt.committing:
        return Outcome(state=state, reason=f"a part of {name} comes too late")
    parts = (*(p for p in attempt.parts if p.rank != event.rank), event)
    attempt = replace(attempt, parts=tuple(sorted(parts, key=lambda p: p.rank)))
    state = _heard_of_final(state, event.step, event.at, policy)
    if len(attempt.parts) < plan.world_size:
        facts = replace(facts, attempts=_with(facts, attempt))
        return Outcome(
            state=replace(state, facts=facts), reason=f"{len(attempt.parts)} parts of {name} are durable"
        )
    attempt = replace(attempt, committing=True)
    facts = replace(facts, attempts=_with(facts, attempt), save_s=max(p.seconds for p in attempt.parts))
    return Outcome(
        state=replace(state, facts=facts),
        commands=(commit_command(facts, attempt),),
        reason=f"every part of {name} is durable",
    )


def commit_command(facts: Facts, attempt: Attempt) -> Commit:
    return Commit(
        generation=attempt.generation,
        step=attempt.step,
        parts=attempt.parts,
        metrics=_metrics(facts, attempt),
    )


def _metrics(facts: Facts, attempt: Attempt) -> tuple[tuple[str, float], ...]:
    """What is known of the step, by its reports and by its parts; what is no number is no metric."""
    reported = dict(facts.metrics).get(attempt.step, ())
    reported = dict(reported) | {name: value for part in attempt.parts for name, value in part.metrics}
    return tuple((name, value) for name, value in reported.items() if math.isfinite(value))


def save_requested(state: State, event: SaveRequested) -> Outcome:
    """A person asks for a checkpoint at the next step."""
    if not isinstance(state.phase, Running):
        return Outcome(state=state, reason=f"no checkpoint now, nothing trains: {event.reason}")
    return Outcome(
        state=replace(state, facts=replace(state.facts, save_asked=event.at, saving=0.0)),
        commands=(Save(generation=state.facts.generation),),
        reason=f"a checkpoint is asked for: {event.reason}",
    )


def save_failed(state: State, event: SaveFailed, policy: Policy) -> Outcome:
    """Drop the attempt. The last checkpoint is tried again, after a moment."""
    facts = _without(state.facts, event.generation, event.step)
    facts = facts if facts.saving is None else replace(facts, saving=None)
    said = f"the checkpoint of step {event.step} could not be written: {event.problem}"
    state = state if facts is state.facts else replace(state, facts=facts)
    current = event.generation == facts.generation and event.step == facts.step
    match state.phase:
        case Pausing(purpose="stop") as phase if current:
            return Outcome(state=replace(state, phase=replace(phase, unsaved=True)), reason=said)
        case Running(final_failed=None) as phase if current and facts.step >= policy.max_steps:
            return Outcome(state=replace(state, phase=replace(phase, final_failed=event.at)), reason=said)
        case _:
            over = facts.step >= policy.max_steps
            return Outcome(state=state, reason=said if over else f"{said}; training goes on")


def peers_held(state: State, event: PeersHeld) -> Outcome:
    """Kept for people: what peer memory takes, and how often it is filled."""
    others = tuple(held for held in state.facts.held if held.node != event.node)
    facts = replace(state.facts, held=(*others, event))
    return Outcome(
        state=replace(state, facts=facts),
        reason=(
            f"{event.node} holds {event.own + event.copies:,} bytes of peer memory, the newest snapshot of "
            f"step {event.step}; {event.spilled:,} bytes were spilled"
        ),
    )


def retry_final(state: State, policy: Policy, at: float) -> Outcome:
    """Ask once more for the last checkpoint where it failed or fell silent; in the end give up."""
    facts, phase = state.facts, state.phase
    assert isinstance(phase, Running)
    failed = phase.final_failed
    silent = at - phase.final_since > policy.timing.progress_s and final_is_missing(state, policy)
    due = failed is not None and at - failed >= BACK_OFF_S * 2**facts.final_tries
    if facts.step < policy.max_steps or not (due or silent):
        return Outcome(state=state)
    lost = set(phase.plan.workers) - {w.name for w in facts.workers}
    if lost:  # while a whole checkpoint was on its way nobody was missed
        cause = Cause(kind="collective", detail=f"{min(lost)} is gone and the last checkpoint is not saved")
        return break_group(state, cause, policy, at, counted=False)
    if facts.final_tries >= policy.final_saves:
        return end(
            state,
            "infrastructure",
            f"all {policy.max_steps} steps are committed and the last checkpoint could not be written in "
            f"{facts.final_tries + 1} tries",
        )
    return Outcome(
        state=State(
            facts=replace(facts, final_tries=facts.final_tries + 1),
            phase=replace(phase, final_failed=None, final_since=at),
        ),
        commands=(Save(generation=facts.generation),),
        reason=f"try {facts.final_tries + 2} for the last checkpoint",
    )


def final_is_missing(state: State, policy: Policy) -> bool:
    """Whether the last step is committed and neither saved nor about to be."""
    facts = state.facts
    return facts.step >= policy.max_steps and not any(
        a.committing and a.step >= policy.max_steps for a in facts.attempts
    )


def checkpoint_committed(state: State, event: CheckpointCommitted, policy: Policy) -> Outcome:
    """A fact of storage, whoever wrote it. Retention moves after it."""
    stored = event.stored
    facts = _without(state.facts, stored.generation, stored.step)
    state = state if facts is state.facts else replace(state, facts=facts)
    if any(c.stored.slot == stored.slot for c in facts.commitments):
        return Outcome(state=state, reason=f"slot {stored.slot} is known to be committed")
    facts = replace(_measured(facts), ever_stored=True)
    if not alive(facts.lineage, stored.generation, stored.step):
        return Outcome(
            state=replace(state, facts=facts),
            reason=f"step {stored.step} of generation {stored.generation} was left behind by the lineage",
        )
    newest = facts.stored is None or stored.step > facts.stored.step
    facts = replace(
        facts,
        commitments=(*facts.commitments, Commitment(stored=stored, metrics=event.metrics)),
        stored=stored if newest else facts.stored,
        step=max(facts.step, stored.step),
        attempts=tuple(a for a in facts.attempts if a.committing or a.step > stored.step),
        final_tries=0,
    )
    state = replace(state, facts=facts)
    said = f"the checkpoint of step {stored.step} is committed"
    forget = Forget(generation=facts.generation, step=stored.step)
    commands: tuple[Command, ...] = (prune_command(state, policy), *((forget,) if policy.logs else ()))
    if stored.step >= policy.max_steps:
        return Outcome(state=state, commands=commands, reason=said).then(
            lambda s: end(s, "finished", f"all {policy.max_steps} steps are committed and saved")
        )
    return Outcome(state=state, commands=commands, reason=said)


def _measured(facts: Facts) -> Facts:
    """The checkpoint that was being written is durable: what it cost is known."""
    return facts if facts.saving is None else replace(facts, save_cost_s=facts.saving, saving=None)


def prune_command(state: State, policy: Policy) -> Prune:
    facts = state.facts
    used = checkpoint_of(state.phase.origin) if isinstance(state.phase, Forming) else None
    return Prune(
        keep=kept_slots(facts.commitments, policy.checkpoints, in_use=used.slot if used else None),
        in_flight=tuple((a.generation, a.step) for a in facts.attempts),
    )


def checkpoint_rejected(state: State, event: CheckpointRejected, policy: Policy) -> Outcome:
    """Fall back to the next sound one; a damaged checkpoint is no failure of the group."""
    facts = state.facts
    said = f"the checkpoint of step {event.stored.step} cannot be used: {event.problem}"
    sound = event.fallback.step if event.fallback is not None else -1
    facts = replace(
        facts,
        commitments=tuple(
            c
            for c in facts.commitments
            if c.stored.slot != event.stored.slot
            and (c.stored.step <= sound or c.stored.step > event.stored.step)
        ),
    )
    if facts.stored is not None and facts.stored.slot == event.stored.slot:
        facts = replace(facts, stored=event.fallback)
    state = replace(state, facts=facts)
    if not (isinstance(state.phase, Forming) and _reads(state.phase, event.stored)):
        return Outcome(state=state, reason=said)
    cause = Cause(kind="engine", detail=said)
    return Outcome(state=state, reason=said).then(
        lambda s: break_group(s, cause, policy, event.at, counted=False)
    )


def _reads(phase: Forming, stored: Stored) -> bool:
    used = checkpoint_of(phase.origin)
    return used is not None and used.slot == stored.slot


def _heard_of_final(state: State, step: int, at: float, policy: Policy) -> State:
    if step >= policy.max_steps and isinstance(state.phase, Running):
        return replace(state, phase=replace(state.phase, final_since=at))
    return state


def _find(facts: Facts, generation: int, step: int) -> Attempt | None:
    return next((a for a in facts.attempts if (a.generation, a.step) == (generation, step)), None)


def _with(facts: Facts, attempt: Attempt) -> tuple[Attempt, ...]:
    """Only the newest collects parts; those ordered to commit wait for their answer."""
    key = (attempt.generation, attempt.step)
    return (*(a for a in facts.attempts if a.committing and (a.generation, a.step) != key), attempt)


def _without(facts: Facts, generation: int, step: int) -> Facts:
    if _find(facts, generation, step) is None:
        return facts
    return replace(
        facts, attempts=tuple(a for a in facts.attempts if (a.generation, a.step) != (generation, step))
    )
