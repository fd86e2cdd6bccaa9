"""Give room back where too few workers start, so that of several runs which hold some each one gets enough.

Every run sees all slots of a full cluster for its own, and takes what it gets. Where each holds less than it
needs and waits for the rest, none would ever train. So a run whose workers find no room lets go of those that
it has, for a while of a length of its own. Whoever is back first finds room for all that it needs.
"""

from __future__ import annotations

import zlib
from dataclasses import replace

from elastic_train.control.commands import StopWorker
from elastic_train.control.events import Cause
from elastic_train.control.membership import present, without_all
from elastic_train.control.policy import Policy
from elastic_train.control.states import Facts, Outcome, State, Waiting

LEAST = 0.1
"""Of the time that a worker may take to start: the shortest while. The longest is all of it."""


def give_room(state: State, policy: Policy, at: float, *, contended: bool) -> Outcome:
    """After a worker did not start in time; `contended`: because others hold the room that it needs."""
    facts, phase = state.facts, state.phase
    workers = facts.membership.workers
    if not isinstance(phase, Waiting) or facts.stopping is not None or not workers:
        return Outcome(state=state)
    if len(present(facts.membership)) >= policy.min_workers:
        return Outcome(state=state)
    if _holds_more_than_storage(facts) and at - phase.since < _kept_s(facts, policy, contended):
        return Outcome(state=state)
    rest_s = _while_s(facts, policy)
    why = "it gives its room to others"
    facts, _ = without_all(facts, {w.name: Cause(kind="preemption", detail=why) for w in workers}, policy, at)
    facts = replace(facts, membership=replace(facts.membership, rests_until=at + rest_s))
    return Outcome(
        state=replace(state, facts=facts),
        commands=tuple(StopWorker(worker=w.name, reason=why) for w in workers),
        reason=f"too few workers start: the room of {len(workers)} is given to others for {rest_s:.0f} s",
    )


def _holds_more_than_storage(facts: Facts) -> bool:
    stored = facts.saves.stored.step if facts.saves.stored is not None else 0
    return bool(facts.survived.local_states) and facts.lineage.step > stored


def _kept_s(facts: Facts, policy: Policy, contended: bool) -> float:
    """For how long state is kept that storage has not: half of the time that capacity is waited for. Where
    others hold the room, who may wait for this one's, no longer than it takes to compute the state again.
    """
    longest_s = policy.timing.wait_for_capacity_s / 2
    return min(longest_s, _again_s(facts)) if contended else longest_s


def _again_s(facts: Facts) -> float:
    stored = facts.saves.stored.step if facts.saves.stored is not None else 0
    return (facts.lineage.step - stored) * (facts.measured.quiet_step_s or facts.measured.step_s)


def _while_s(facts: Facts, policy: Policy) -> float:
    """Another one each time, and for each run."""
    drawn = zlib.crc32(f"{policy.salt} {facts.membership.born}".encode()) / 2**32
    return policy.timing.start_worker_s * (LEAST + (1.0 - LEAST) * drawn)
