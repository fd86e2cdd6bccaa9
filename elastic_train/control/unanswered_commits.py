"""Read the commit log where a commit had no answer: it may have succeeded.

What storage holds is read before a run goes back to it, so that nobody starts before the newest checkpoint of
the log.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from elastic_train.control.commands import ReadLog
from elastic_train.control.ending import end
from elastic_train.control.events import LogRead
from elastic_train.control.policy import Policy
from elastic_train.control.states import Facts, Outcome, State, Waiting
from elastic_train.control.storage_trouble import over, reported, rests, spent, troubled
from elastic_train.recovery.evidence import Commitment, Stored
from elastic_train.recovery.lineage import alive, back_to


def read_log(state: State, at: float) -> Outcome:
    """Have the log read, once at a time."""
    facts = state.facts
    if facts.saves.reading is not None or rests(facts.saves, at):
        return Outcome(state=state)
    return Outcome(
        state=replace(state, facts=replace(facts, saves=replace(facts.saves, reading=at))),
        commands=(ReadLog(),),
        reason="a commit had no answer and may have come true: the commit log is read",
    )


def due_at(facts: Facts, policy: Policy) -> float:
    """By when the log was read."""
    return (facts.saves.reading or 0.0) + policy.timing.settle_s + policy.timing.storage_trouble_s


def log_read(state: State, event: LogRead, policy: Policy) -> Outcome:
    facts = state.facts
    if facts.saves.reading is None:
        return Outcome(state=state, reason="nobody waits for what the commit log says")
    saves = replace(facts.saves, reading=None)
    if event.problem:
        blocked = isinstance(state.phase, Waiting)
        saves = troubled(saves, event.problem, policy, event.at, blocked=blocked)
        state = replace(state, facts=replace(facts, saves=saves))
        if blocked and spent(saves, policy):
            why = f"what was committed is not known: {reported(saves, event.at)}"
            return end(state, "infrastructure", why)
        return Outcome(state=state, reason=f"the commit log could not be read: {event.problem}")
    facts = replace(facts, saves=over(saves))
    facts = with_newest(facts, event.stored, event.kept, trusted=isinstance(state.phase, Waiting))
    step = event.stored.step if event.stored is not None else 0
    state = replace(state, facts=facts)
    if facts.saves.stored is not None and facts.saves.stored.step >= policy.max_steps:
        return end(state, "finished", f"all {policy.max_steps} steps are committed and saved")
    return Outcome(
        state=state,
        reason=f"the newest checkpoint of the commit log is of step {step}"
        if step
        else "the commit log has no checkpoint",
    )


def with_newest(
    facts: Facts, stored: Stored | None, kept: Sequence[Commitment] = (), *, trusted: bool
) -> Facts:
    """Take the commit log's word for the newest checkpoint, and for those in `kept` that nobody told of:
    retention knows them then, with their metrics.

    One that the lineage left behind waits, while members may be alive that went on without it. Where nobody
    is, the run goes back to it: a checkpoint of a branch is better than an older one. What was ordered to be
    committed before it is not any more: the newest record stays that of the newest step.
    """
    facts = replace(facts, saves=replace(facts.saves, unsure=False, reading=None))
    if stored is None:
        return replace(facts, saves=replace(facts.saves, stored=None, commitments=()))
    if facts.lineage.chain and not alive(facts.lineage.chain, stored.generation, stored.step):
        if not trusted:
            return replace(facts, saves=replace(facts.saves, logged=stored))
        lineage = back_to(facts.lineage.chain, stored.generation, stored.step)
        left = tuple(c for c in facts.saves.commitments if alive(lineage, c.stored.generation, c.stored.step))
        facts = replace(
            facts,
            lineage=replace(facts.lineage, chain=lineage, step=stored.step),
            saves=replace(facts.saves, commitments=left),
        )
    known = tuple(c for c in facts.saves.commitments if c.stored.step <= stored.step)
    told = max((c.stored.slot for c in known), default=0)
    known += tuple(c for c in kept or (Commitment(stored=stored),) if told < c.stored.slot <= stored.slot)
    return replace(
        facts,
        saves=replace(
            facts.saves,
            stored=stored,
            commitments=known,
            attempts=tuple(a for a in facts.saves.attempts if a.step > stored.step),
            ever_stored=True,
        ),
        lineage=replace(
            facts.lineage,
            generation=max(facts.lineage.generation, stored.generation),
            step=max(facts.lineage.step, stored.step),
        ),
    )
