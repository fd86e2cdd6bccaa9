"""Order checkpoint commits, repeat those without an answer, and give them up after a deadline.

A commit is idempotent, so one without an answer is ordered again, later each time. Until then a recovery from
storage waits for it, and so does the end of a run.
"""

from __future__ import annotations

import math
from dataclasses import replace

from elastic_train.control.commands import Commit
from elastic_train.control.events import SaveFailed
from elastic_train.control.policy import Policy
from elastic_train.control.states import Attempt, Facts, Outcome, Saves, State


def order(saves: Saves, attempt: Attempt, at: float) -> tuple[Attempt, Commit]:
    """The attempt once its commit was ordered, for the first time or again."""
    since = attempt.since if attempt.committing else at
    attempt = replace(attempt, committing=True, since=since, ordered=at, orders=attempt.orders + 1)
    return attempt, commit_command(saves, attempt)


def commit_command(saves: Saves, attempt: Attempt) -> Commit:
    return Commit(
        generation=attempt.generation,
        step=attempt.step,
        parts=attempt.parts,
        metrics=_metrics(saves, attempt),
    )


def _metrics(saves: Saves, attempt: Attempt) -> tuple[tuple[str, float], ...]:
    """What is known of the step, by its reports and by its parts; what is no number is no metric."""
    reported = dict(saves.metrics).get(attempt.step, ())
    reported = dict(reported) | {name: value for part in attempt.parts for name, value in part.metrics}
    return tuple((name, value) for name, value in reported.items() if math.isfinite(value))


def due_at(facts: Facts, attempt: Attempt, policy: Policy) -> float:
    """By when a commit is answered: what its parts took tells how slow storage is."""
    wait_s = policy.timing.settle_s + 2.0 * (facts.measured.save_s or 0.0)
    longest_s = policy.timing.storage_trouble_s / 4  # so that one answer that is lost costs no checkpoint
    return attempt.ordered + min(wait_s * 2.0 ** (attempt.orders - 1), longest_s)


def order_again(state: State, policy: Policy, at: float) -> Outcome:
    """Order what had no answer again, unless a newer checkpoint was ordered: a run goes on from the newest
    record, so none is written after that of a newer step.
    """
    facts, saves = state.facts, state.facts.saves
    late = [
        a
        for a in saves.attempts
        if a.committing and at > due_at(facts, a, policy) and not given_up(a, policy, at)
    ]
    if not late:
        return Outcome(state=state)
    newest = max(a.step for a in saves.attempts if a.committing)
    newest = max(newest, saves.stored.step if saves.stored is not None else 0)
    again = {id(a): order(saves, a, at) for a in late if a.step == newest}
    attempts = tuple(
        again[id(a)][0] if id(a) in again else a for a in saves.attempts if id(a) in again or a not in late
    )
    steps = ", ".join(str(a.step) for a in late)
    saves = replace(saves, attempts=attempts, unsure=saves.unsure or len(again) < len(late))
    return Outcome(
        state=replace(state, facts=replace(facts, saves=saves)),
        commands=tuple(command for _, command in again.values()),
        reason=f"the commit of step {steps} had no answer"
        + (" and is ordered again" if again else ": a newer one was ordered since"),
    )


def given_up_at(attempt: Attempt, policy: Policy) -> float:
    """When nobody waits for the answer to a commit any more."""
    return attempt.since + policy.timing.storage_trouble_s


def given_up(attempt: Attempt, policy: Policy, at: float) -> bool:
    return at > given_up_at(attempt, policy)


def unanswered(state: State, policy: Policy, at: float) -> SaveFailed | None:
    """The failure of a commit that never had an answer."""
    late = next((a for a in state.facts.saves.attempts if a.committing and given_up(a, policy, at)), None)
    if late is None:
        return None
    problem = f"its commit had no answer for {at - late.since:.0f} s"
    return SaveFailed(at=at, generation=late.generation, step=late.step, problem=problem)
