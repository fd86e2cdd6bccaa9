"""Collect the parts of a checkpoint, order its commit, apply retention, and handle failed saves.

A checkpoint is whole when every rank of its generation's plan wrote its part. Parts count as long as their
step belongs to the lineage, even if their group is over by then: what is durable is durable. A save that
fails costs nothing but itself; training goes on.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace

from elastic_train.control.commands import Command, Forget, Prune, Save
from elastic_train.control.commits import order
from elastic_train.control.committed_steps import asked
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
from elastic_train.control.final_checkpoint import heard
from elastic_train.control.policy import Policy
from elastic_train.control.retention import kept_slots
from elastic_train.control.states import (
    Attempt,
    Forming,
    Measurements,
    Outcome,
    Pausing,
    Running,
    Saves,
    State,
    Unsaved,
)
from elastic_train.control.storage_trouble import over, troubled
from elastic_train.recovery.evidence import Commitment, Stored, checkpoint_of
from elastic_train.recovery.lineage import alive


def part_written(state: State, event: PartWritten, policy: Policy) -> Outcome:
    facts, saves = state.facts, state.facts.saves
    plan = dict(facts.lineage.plans).get(event.generation)
    name = f"step {event.step} of generation {event.generation}"
    if plan is None or not alive(facts.lineage.chain, event.generation, event.step):
        return Outcome(state=state, reason=f"fenced: {name} does not belong to the lineage")
    attempt = _find(saves, event.generation, event.step) or Attempt(
        generation=event.generation, step=event.step
    )
    # Commits are in the order of steps. Until a newer one is ordered, the ranks of a generation may report
    # parts of both.
    newer = any(
        (a.step, a.generation) > (event.step, event.generation)
        and (a.committing or a.generation != event.generation)
        for a in saves.attempts
    )
    stored = saves.stored is not None and saves.stored.step >= event.step
    if newer or stored or attempt.committing:
        return Outcome(state=state, reason=f"a part of {name} comes too late")
    place = bisect_left(attempt.parts, event.rank, key=lambda p: p.rank)
    known = place < len(attempt.parts) and attempt.parts[place].rank == event.rank
    parts = (*attempt.parts[:place], event, *attempt.parts[place + known :])
    attempt = replace(attempt, parts=parts)
    state = heard(state, event.step, event.at, policy)
    if len(attempt.parts) < plan.world_size:
        return Outcome(
            state=replace(state, facts=replace(facts, saves=_with(saves, attempt))),
            reason=f"{len(attempt.parts)} parts of {name} are durable",
        )
    measured = replace(facts.measured, save_s=max(p.seconds for p in attempt.parts))
    attempt, commit = order(saves, attempt, event.at)
    return Outcome(
        state=replace(state, facts=replace(facts, saves=_with(saves, attempt), measured=measured)),
        commands=(commit,),
        reason=f"every part of {name} is durable",
    )


def save_requested(state: State, event: SaveRequested) -> Outcome:
    """A person asks for a checkpoint at the next step."""
    if not isinstance(state.phase, Running):
        return Outcome(state=state, reason=f"no checkpoint now, nothing trains: {event.reason}")
    return Outcome(
        state=replace(state, facts=asked(state.facts, event.at)),
        commands=(Save(generation=state.facts.lineage.generation),),
        reason=f"a checkpoint is asked for: {event.reason}",
    )


def save_failed(state: State, event: SaveFailed, policy: Policy) -> Outcome:
    """Drop the attempt; that storage failed is noted. A checkpoint without which the run cannot end is tried
    again, after a moment."""
    facts, phase = state.facts, state.phase
    known = _find(facts.saves, event.generation, event.step)
    saves = _without(facts.saves, event.generation, event.step)
    if known is not None and known.committing:  # only its answer may be lost
        saves = replace(saves, unsure=True)
    measured = facts.measured
    measured = measured if measured.saving_s is None else replace(measured, saving_s=None)
    said = f"the checkpoint of step {event.step} could not be written: {event.problem}"
    current = event.generation == facts.lineage.generation and event.step == facts.lineage.step
    through = facts.lineage.step >= policy.max_steps
    needed = current and (through or (isinstance(phase, Pausing) and phase.purpose == "stop"))
    saves = troubled(saves, event.problem, policy, event.at, blocked=needed)
    saves = replace(saves, unsaved=_unsaved(saves.unsaved, event))
    state = replace(state, facts=replace(facts, saves=saves, measured=measured))
    if (over := _too_long_unsaved(saves, policy, event.at)) is not None:
        return end(state, "infrastructure", f"{over}; the last: {event.problem}")
    match phase:
        case Pausing(purpose="stop", unsaved=None) if current:
            return Outcome(state=replace(state, phase=replace(phase, unsaved=event.at)), reason=said)
        case Running(final_failed=None) if needed:
            return Outcome(state=replace(state, phase=replace(phase, final_failed=event.at)), reason=said)
        case _:
            return Outcome(state=state, reason=said if through else f"{said}; training goes on")


def _unsaved(known: Unsaved | None, event: SaveFailed) -> Unsaved:
    """Every rank may tell of the same checkpoint."""
    if known is None:
        return Unsaved(times=1, since=event.at, step=event.step)
    return known if known.step == event.step else replace(known, times=known.times + 1, step=event.step)


def _too_long_unsaved(saves: Saves, policy: Policy, at: float) -> str | None:
    """What to say of it where a person bears no more checkpoints that could not be written."""
    unsaved = saves.unsaved
    if unsaved is None:
        return None
    often = policy.unsaved is not None and unsaved.times >= policy.unsaved
    if not often and (policy.unsaved_s is None or at - unsaved.since < policy.unsaved_s):
        return None
    limit = f"Limits(unsaved={policy.unsaved})" if often else f"Limits(unsaved_s={policy.unsaved_s:g})"
    kept = f"step {saves.stored.step} is kept" if saves.stored is not None else "nothing was saved"
    return (
        f"{unsaved.times} checkpoints in a row could not be written, in {at - unsaved.since:.0f} s "
        f"({limit}); {kept}"
    )


def peers_held(state: State, event: PeersHeld) -> Outcome:
    """Kept for people: what peer memory takes, and how often it is filled."""
    measured = state.facts.measured
    others = tuple(held for held in measured.peer_memory if held.node != event.node)
    measured = replace(measured, peer_memory=(*others, event))
    return Outcome(
        state=replace(state, facts=replace(state.facts, measured=measured)),
        reason=(
            f"{event.node} holds {event.own + event.copies:,} bytes of peer memory, the newest snapshot of "
            f"step {event.step}; {event.spilled:,} bytes were spilled"
        ),
    )


def checkpoint_committed(state: State, event: CheckpointCommitted, policy: Policy) -> Outcome:
    """Note a checkpoint that is durable, and apply retention."""
    stored = event.stored
    facts = state.facts
    saves = _without(facts.saves, stored.generation, stored.step)
    if any(c.stored.slot == stored.slot for c in saves.commitments):
        state = state if saves is facts.saves else replace(state, facts=replace(facts, saves=saves))
        return Outcome(state=state, reason=f"slot {stored.slot} is known to be committed")
    saves = replace(over(saves), ever_stored=True, unsaved=None)
    facts = replace(facts, saves=saves, measured=_measured(facts.measured))
    if not alive(facts.lineage.chain, stored.generation, stored.step):
        return Outcome(
            state=replace(state, facts=facts),
            reason=f"step {stored.step} of generation {stored.generation} was left behind by the lineage",
        )
    newest = saves.stored is None or stored.step > saves.stored.step
    facts = replace(
        facts,
        saves=replace(
            saves,
            commitments=(*saves.commitments, Commitment(stored=stored, metrics=event.metrics)),
            stored=stored if newest else saves.stored,
            unsure=saves.unsure and not newest,
            attempts=tuple(a for a in saves.attempts if a.committing or a.step > stored.step),
            final_tries=0,
        ),
        lineage=replace(facts.lineage, step=max(facts.lineage.step, stored.step)),
    )
    state = replace(state, facts=facts)
    said = f"the checkpoint of step {stored.step} is committed"
    forget = Forget(generation=facts.lineage.generation, step=stored.step)
    prune = prune_command(state, policy)  # and nobody goes back to what it deletes
    left = tuple(c for c in facts.saves.commitments if c.stored.slot in prune.keep)
    state = replace(state, facts=replace(facts, saves=replace(facts.saves, commitments=left)))
    commands: tuple[Command, ...] = (prune, *((forget,) if policy.logs else ()))
    if stored.step >= policy.max_steps:
        return Outcome(state=state, commands=commands, reason=said).then(
            lambda s: end(s, "finished", f"all {policy.max_steps} steps are committed and saved")
        )
    return Outcome(state=state, commands=commands, reason=said)


def _measured(measured: Measurements) -> Measurements:
    """The checkpoint that was being written is durable: what it cost is known."""
    if measured.saving_s is None:
        return measured
    return replace(measured, save_cost_s=measured.saving_s, saving_s=None)


def prune_command(state: State, policy: Policy) -> Prune:
    facts = state.facts
    used = checkpoint_of(state.phase.origin) if isinstance(state.phase, Forming) else None
    return Prune(
        keep=kept_slots(facts.saves.commitments, policy.checkpoints, in_use=used.slot if used else None),
        in_flight=tuple((a.generation, a.step) for a in facts.saves.attempts),
    )


def checkpoint_rejected(state: State, event: CheckpointRejected, policy: Policy) -> Outcome:
    """Fall back to the next sound one; a damaged checkpoint is no failure of the group."""
    saves = state.facts.saves
    said = f"the checkpoint of step {event.stored.step} cannot be used: {event.problem}"
    sound = event.fallback.step if event.fallback is not None else -1
    left = tuple(
        c
        for c in saves.commitments
        if c.stored.slot != event.stored.slot
        and (c.stored.step <= sound or c.stored.step > event.stored.step)
    )
    damaged = saves.stored is not None and saves.stored.slot == event.stored.slot
    saves = replace(saves, commitments=left, stored=event.fallback if damaged else saves.stored)
    state = replace(state, facts=replace(state.facts, saves=saves))
    if not (isinstance(state.phase, Forming) and _reads(state.phase, event.stored)):
        return Outcome(state=state, reason=said)
    cause = Cause(kind="damage", detail=said)
    return Outcome(state=state, reason=said).then(lambda s: break_group(s, cause, policy, event.at))


def _reads(phase: Forming, stored: Stored) -> bool:
    used = checkpoint_of(phase.origin)
    return used is not None and used.slot == stored.slot


def _find(saves: Saves, generation: int, step: int) -> Attempt | None:
    return next((a for a in saves.attempts if (a.generation, a.step) == (generation, step)), None)


def _with(saves: Saves, attempt: Attempt) -> Saves:
    """Attempts ordered to commit wait for their answer. Of the rest two collect parts: a rank may report the
    next checkpoint before another has reported this one. What is older than one that is ordered never can be.
    """
    key = (attempt.generation, attempt.step)
    others = [a for a in saves.attempts if (a.generation, a.step) != key]
    collecting = [a for a in others if not a.committing and a.generation == attempt.generation]
    if attempt.committing:
        collecting = [a for a in collecting if a.step > attempt.step]
    newest = max(collecting, key=lambda a: a.step, default=None)
    return replace(saves, attempts=(*(a for a in others if a.committing or a is newest), attempt))


def _without(saves: Saves, generation: int, step: int) -> Saves:
    left = tuple(a for a in saves.attempts if (a.generation, a.step) != (generation, step))
    return saves if len(left) == len(saves.attempts) else replace(saves, attempts=left)
