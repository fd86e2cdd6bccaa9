"""List what a run waits for and the deadline of each wait. Every phase has one, or an effect that ends.

Deadlines follow from what is known: what the last save took, when a group was last seen to move, how long
storage has failed. `deadlines` judges them. The simulator holds that there always is one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import assert_never

from elastic_train.config import Timing
from elastic_train.control import commits, final_checkpoint, preparation, resend_commands, unanswered_commits
from elastic_train.control.membership import present, starting
from elastic_train.control.policy import Policy
from elastic_train.control.states import Ended, Facts, Forming, Pausing, Running, Settling, State, Waiting
from elastic_train.control.stopping import being_saved
from elastic_train.control.storage_trouble import again_at
from elastic_train.recovery.evidence import Mixed, Origin

NEVER = -math.inf
"""When nobody was seen to move."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """`until`: when something is done if it does not end by itself; None where the watch over a group's
    members ends it, by `Hung` or `WorkerLost`."""

    what: str
    until: float | None


def waits(state: State, policy: Policy, moved: float = NEVER) -> tuple[Wait, ...]:
    """Everything that a run waits for. Empty only where it has ended."""
    facts, phase, timing = state.facts, state.phase, policy.timing
    found = [
        Wait(what=f"{w.name} to start", until=w.since + timing.start_worker_s)
        for w in facts.membership.workers
        if w.status == "starting"
    ]
    found += [
        Wait(what=f"the commit of step {a.step}", until=commits.due_at(facts, a, policy))
        for a in facts.saves.attempts
        if a.committing
    ]
    match phase:
        case Waiting():
            if facts.survived.asking:
                found.append(Wait(what="the peer stores", until=peers_due_at(facts, policy)))
            elif facts.saves.reading is not None:
                found.append(Wait(what="the commit log", until=unanswered_commits.due_at(facts, policy)))
            elif any(a.committing for a in facts.saves.attempts):
                pass  # which may be nearer than what else could be gone on from, and is given up in time
            elif lacks_workers(facts, phase, policy):
                found.append(Wait(what="workers", until=phase.since + timing.wait_for_capacity_s))
            elif facts.saves.trouble is not None and not starting(facts.membership):
                found.append(Wait(what="storage", until=again_at(facts.saves.trouble)))
        case Forming():
            found.append(Wait(what="the group to form", until=forming_due_at(phase, policy, moved)))
        case Running() if facts.lineage.step >= policy.max_steps:
            if final_checkpoint.is_missing(state, policy):
                due = final_checkpoint.due_at(state, phase, policy, moved)
                found.append(Wait(what="the last checkpoint", until=due))
        case Running() if resend_commands.has_to_begin(facts, phase, policy):
            due = min(resend_commands.again_at(phase, policy), resend_commands.begun_by(phase, policy, moved))
            found.append(Wait(what="the group to begin", until=due))
        case Running(preparation=made):
            if made is not None and made.took is None:
                found.append(Wait(what="the next group to be ready", until=preparation.due_at(made, policy)))
            living = {w.name for w in facts.membership.workers}
            if living.issuperset(phase.plan.workers):
                found.append(Wait(what=f"step {facts.lineage.step + 1}", until=None))
        case Pausing():
            found.append(
                Wait(what="the group to stand still", until=pause_due_at(facts, phase, policy, moved))
            )
        case Settling():
            found.append(Wait(what="final reports", until=settling_due_at(phase, policy, moved)))
        case Ended():
            return ()
        case _:
            assert_never(phase)
    return tuple(found)


def settling_due_at(phase: Settling, policy: Policy, moved: float) -> float:
    """Whoever is in the job's own code may end it: until then nobody knows what it changes."""
    return max(phase.since, moved) + policy.timing.settle_s


def pause_due_at(facts: Facts, phase: Pausing, policy: Policy, moved: float) -> float:
    """A boundary may be as far away as the longest thing that moves nobody: an evaluation, a save, a step."""
    if phase.unsaved is not None and facts.saves.trouble is not None:
        return again_at(facts.saves.trouble)
    due = max(phase.since, phase.heard, moved) + final_checkpoint.silence_s(facts, policy)
    if phase.purpose == "stop" and (ordered := being_saved(facts)) is not None:
        due = max(due, commits.due_at(facts, ordered, policy), commits.given_up_at(ordered, policy))
    return due


def forming_due_at(phase: Forming, policy: Policy, moved: float) -> float:
    """The engine's own part has `form_s`; members inside the job's own code move, while that may last."""
    limit = form_limit_s(phase.origin, policy.timing)
    return min(max(phase.since, moved), phase.since + policy.timing.user_code_s) + limit


def form_limit_s(origin: Origin, timing: Timing) -> float:
    """Seconds that forming a group may take. Steps that are replayed count as steps."""
    replays = isinstance(origin, Mixed) and origin.replays
    return timing.form_s + (timing.progress_s if replays else 0.0)


def peers_due_at(facts: Facts, policy: Policy) -> float:
    return facts.survived.asked_at + policy.timing.settle_s


def lacks_workers(facts: Facts, phase: Waiting, policy: Policy) -> bool:
    """Whether capacity is what a run waits for. Workers that start have a limit of their own, and those that
    are there may wait for peer stores or storage.
    """
    coming = starting(facts.membership)
    if len(coming) + len(present(facts.membership)) < policy.min_workers:
        return True
    return not coming and bool(phase.problem)
