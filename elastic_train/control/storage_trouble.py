"""Storage trouble: back off, keep training, and give up after `storage_trouble_s` of being blocked.

Storage that fails says nothing about machines. What needs it asks again, later each time; a run that can
train without it trains on. Only a run that cannot go on, or cannot end as it should, without storage gives
up, once it was held up for as long as `storage_trouble_s`.
"""

from __future__ import annotations

from dataclasses import replace

from elastic_train.control.policy import Policy
from elastic_train.control.states import Outcome, Saves, State, Trouble

FIRST_S = 5.0
LONGEST_S = 60.0


def troubled(saves: Saves, problem: str, policy: Policy, at: float, *, blocked: bool = False) -> Saves:
    """Storage failed once more. Reports that come before it is asked again are of the same failure."""
    known = saves.trouble
    forgotten_s = policy.timing.storage_trouble_s
    if known is None or (known.blocked is None and at - known.last > forgotten_s):
        known = Trouble(since=at, last=at, times=0, problem=problem)
    if known.times == 0 or at >= again_at(known):
        known = replace(known, times=known.times + 1, last=at, problem=problem)
    if blocked and known.blocked is None:
        known = replace(known, blocked=at)
    return saves if known == saves.trouble else replace(saves, trouble=known)


def journal_held_up(state: State, problem: str, policy: Policy, at: float) -> Outcome:
    saves = troubled(state.facts.saves, problem, policy, at)
    facts = replace(state.facts, saves=saves)
    return Outcome(state=replace(state, facts=facts), reason=f"the journal can't be written: {problem}")


def journal_durable(state: State) -> Outcome:
    """Storage takes what it is given. What a run waits for may be something else, and is asked for itself."""
    said, trouble = "the journal is written again", state.facts.saves.trouble
    if trouble is None or trouble.blocked is not None:
        return Outcome(state=state, reason=said)
    facts = replace(state.facts, saves=over(state.facts.saves))
    return Outcome(state=replace(state, facts=facts), reason=said)


def over(saves: Saves) -> Saves:
    """Storage did what it was asked to."""
    return saves if saves.trouble is None else replace(saves, trouble=None)


def blocked(saves: Saves, at: float) -> Saves:
    """The run can't go on before storage is asked again."""
    trouble = saves.trouble
    if trouble is None or trouble.blocked is not None:
        return saves
    return replace(saves, trouble=replace(trouble, blocked=at))


def unblocked(saves: Saves) -> Saves:
    """The run goes on without storage."""
    trouble = saves.trouble
    if trouble is None or trouble.blocked is None:
        return saves
    return replace(saves, trouble=replace(trouble, blocked=None))


def again_at(trouble: Trouble) -> float:
    """When storage is asked again."""
    return trouble.last + min(FIRST_S * 2.0 ** (trouble.times - 1), LONGEST_S)


def rests(saves: Saves, at: float) -> bool:
    """Whether storage is left alone for now."""
    return saves.trouble is not None and at < again_at(saves.trouble)


def spent(saves: Saves, policy: Policy) -> bool:
    """Whether storage failed again after it had held up the run for as long as is borne."""
    trouble = saves.trouble
    if trouble is None or trouble.blocked is None:
        return False
    return trouble.last - trouble.blocked > policy.timing.storage_trouble_s


def reported(saves: Saves, at: float) -> str:
    """What storage did to the run, for people."""
    trouble = saves.trouble
    assert trouble is not None
    since = trouble.since if trouble.blocked is None else trouble.blocked
    return f"storage failed for {at - since:.0f} s: {trouble.problem}"
