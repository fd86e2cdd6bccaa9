"""Trouble of storage: an account of its own, in time.

Storage that fails says nothing about machines. Whoever needs it asks again, later each time; a run that can
train without it trains on. Only a run that cannot go on, or cannot end as it should, without storage gives
up, once it was held up for as long as `storage_trouble_s`.
"""

from __future__ import annotations

from dataclasses import replace

from elastic_train.control.policy import Policy
from elastic_train.control.states import Facts, Trouble

FIRST_S = 5.0
LONGEST_S = 60.0


def troubled(facts: Facts, problem: str, policy: Policy, at: float, *, blocked: bool = False) -> Facts:
    """Storage failed once more. Words that come while nobody asks it again tell of the same time."""
    known = facts.trouble
    forgotten_s = policy.timing.storage_trouble_s
    if known is None or (known.blocked is None and at - known.last > forgotten_s):
        known = Trouble(since=at, last=at, times=0, problem=problem)
    if known.times == 0 or at >= again_at(known):
        known = replace(known, times=known.times + 1, last=at, problem=problem)
    if blocked and known.blocked is None:
        known = replace(known, blocked=at)
    return facts if known == facts.trouble else replace(facts, trouble=known)


def over(facts: Facts) -> Facts:
    """Storage did what it was asked to."""
    return facts if facts.trouble is None else replace(facts, trouble=None)


def unblocked(facts: Facts) -> Facts:
    """The run goes on without storage."""
    trouble = facts.trouble
    if trouble is None or trouble.blocked is None:
        return facts
    return replace(facts, trouble=replace(trouble, blocked=None))


def again_at(trouble: Trouble) -> float:
    """When storage is asked again."""
    return trouble.last + min(FIRST_S * 2.0 ** (trouble.times - 1), LONGEST_S)


def rests(facts: Facts, at: float) -> bool:
    """Whether storage is left alone for now."""
    return facts.trouble is not None and at < again_at(facts.trouble)


def spent(facts: Facts, policy: Policy) -> bool:
    """Whether storage failed again after it had held up the run for as long as is borne."""
    trouble = facts.trouble
    if trouble is None or trouble.blocked is None:
        return False
    return trouble.last - trouble.blocked > policy.timing.storage_trouble_s


def reported(facts: Facts, at: float) -> str:
    """What storage did to the run, for people."""
    trouble = facts.trouble
    assert trouble is not None
    since = trouble.since if trouble.blocked is None else trouble.blocked
    return f"storage failed for {at - since:.0f} s: {trouble.problem}"
