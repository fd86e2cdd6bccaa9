"""Apply the deadlines of every phase on each tick. `waits` computes when they are."""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from elastic_train.control import final_checkpoint, preparation, resend_commands, unanswered_commits
from elastic_train.control.checkpoint_saving import save_failed
from elastic_train.control.commands import StopWorker
from elastic_train.control.commits import order_again, unanswered
from elastic_train.control.ending import end
from elastic_train.control.events import Cause, LogRead, NotPrepared, Tick
from elastic_train.control.failure import break_group, give_up_silent
from elastic_train.control.give_room import give_room
from elastic_train.control.membership import present, staff, without
from elastic_train.control.policy import Policy
from elastic_train.control.states import (
    Ended,
    Forming,
    Outcome,
    Pausing,
    Phase,
    Preparation,
    Running,
    Settling,
    State,
    Trouble,
    Waiting,
)
from elastic_train.control.stopping import end_stopped, save_again
from elastic_train.control.unanswered_commits import log_read
from elastic_train.control.waits import (
    NEVER,
    form_limit_s,
    forming_due_at,
    lacks_workers,
    pause_due_at,
    peers_due_at,
    settling_due_at,
)
from elastic_train.planner.plan import counted
from elastic_train.recovery.evidence import checkpoint_of


def tick(state: State, event: Tick, policy: Policy) -> Outcome:
    outcome = Outcome(state=state)
    if event.late > policy.late_ticks * policy.tick_s:
        outcome = Outcome(
            state=shifted(state, event.late),
            reason=f"the controller stood still for {event.late:.1f} s: deadlines are moved",
        )
    moved = NEVER if event.moved_s is None else event.at - event.moved_s
    return (
        outcome.then(lambda s: _late_starts(s, policy, event.at))
        .then(lambda s: _late_commits(s, policy, event.at))
        .then(lambda s: _deadline(s, policy, event.at, moved))
        .then(lambda s: staff(s, policy, event.at))
    )


def shifted(state: State, seconds: float) -> State:
    """The state as if it had been reached `seconds` later: time that nobody watched doesn't count."""

    def later(at: float | None) -> float | None:
        return None if at is None else at + seconds

    facts, trouble, unsaved = state.facts, state.facts.saves.trouble, state.facts.saves.unsaved
    facts = replace(
        facts,
        membership=replace(
            facts.membership,
            workers=tuple(replace(w, since=w.since + seconds) for w in facts.membership.workers),
            rests_until=facts.membership.rests_until + seconds,
            flaps=tuple(
                replace(f, ends=tuple(t + seconds for t in f.ends), until=f.until + seconds)
                for f in facts.membership.flaps
            ),
        ),
        saves=replace(
            facts.saves,
            attempts=tuple(
                replace(a, since=a.since + seconds, ordered=a.ordered + seconds) for a in facts.saves.attempts
            ),
            trouble=None if trouble is None else _shifted_trouble(trouble, seconds),
            unsaved=None if unsaved is None else replace(unsaved, since=unsaved.since + seconds),
            reading=later(facts.saves.reading),
            asked=later(facts.saves.asked),
        ),
        failures=replace(
            facts.failures, incidents=tuple(replace(i, at=i.at + seconds) for i in facts.failures.incidents)
        ),
        survived=replace(facts.survived, asked_at=facts.survived.asked_at + seconds),
        measured=replace(
            facts.measured, began=later(facts.measured.began), resized=later(facts.measured.resized)
        ),
    )
    return State(facts=facts, phase=_shifted_phase(state.phase, seconds), now=state.now + seconds)


def _shifted_trouble(trouble: Trouble, seconds: float) -> Trouble:
    blocked = None if trouble.blocked is None else trouble.blocked + seconds
    return replace(trouble, since=trouble.since + seconds, last=trouble.last + seconds, blocked=blocked)


def _shifted_phase(phase: Phase, seconds: float) -> Phase:
    match phase:
        case Waiting(paused=paused) | Forming(paused=paused):
            paused = None if paused is None else paused + seconds
            return replace(phase, since=phase.since + seconds, paused=paused)
        case Running(final_failed=failed, declined=declined, stands=stands, preparation=made):
            failed = None if failed is None else failed + seconds
            stands = None if stands is None else stands + seconds
            return replace(
                phase,
                since=phase.since + seconds,
                final_since=phase.final_since + seconds,
                final_failed=failed,
                stands=stands,
                declined=None if declined is None else replace(declined, at=declined.at + seconds),
                preparation=None if made is None else replace(made, since=made.since + seconds),
            )
        case Pausing(unsaved=unsaved):
            unsaved = None if unsaved is None else unsaved + seconds
            return replace(
                phase,
                since=phase.since + seconds,
                heard=phase.heard + seconds,
                stands=phase.stands + seconds,
                unsaved=unsaved,
            )
        case Settling():
            return replace(phase, since=phase.since + seconds)
        case Ended():
            return phase
    assert_never(phase)


def _late_starts(state: State, policy: Policy, at: float) -> Outcome:
    """Give up workers that take too long to start."""
    facts = state.facts
    late = [
        w
        for w in facts.membership.workers
        if w.status == "starting" and at - w.since > policy.timing.start_worker_s
    ]
    notes: list[str] = []
    for worker in late:
        kind = "preemption" if worker.lacks_room else "silence"
        facts, note = without(facts, worker, Cause(kind=kind, detail="it did not start"), policy, at)
        what = "found no room on" if worker.lacks_room else "did not start on"
        limit = f"{worker.name} {what} {worker.node} within {policy.timing.start_worker_s:.0f} s"
        notes += filter(None, (limit, note))
    if not late:
        return Outcome(state=state)
    given_up = Outcome(
        state=replace(state, facts=facts),
        commands=tuple(StopWorker(worker=w.name, reason="it took too long to start") for w in late),
        reason="; ".join(notes),
    )
    contended = any(w.lacks_room for w in late)
    return given_up.then(lambda s: give_room(s, policy, at, contended=contended))


def _late_commits(state: State, policy: Policy, at: float) -> Outcome:
    """Order commits without an answer again, and in the end do without them."""
    lost = unanswered(state, policy, at)
    outcome = Outcome(state=state) if lost is None else save_failed(state, lost, policy)
    return outcome.then(lambda s: order_again(s, policy, at))


def _deadline(state: State, policy: Policy, at: float, moved: float) -> Outcome:
    facts, phase, timing = state.facts, state.phase, policy.timing
    match phase:
        case Waiting() if facts.survived.asking and at > peers_due_at(facts, policy):
            survived = replace(facts.survived, asking=False, snapshots=())
            return Outcome(
                state=replace(state, facts=replace(facts, survived=survived)),
                reason="the peer stores gave no answer: the run goes on without them",
            )
        case Waiting() if facts.saves.reading is not None and at > unanswered_commits.due_at(facts, policy):
            return log_read(state, LogRead(at=at, problem="the commit log gave no answer"), policy)
        case Waiting() if facts.survived.asking or facts.saves.reading is not None:
            return Outcome(state=state)
        case Waiting() if at - phase.since > timing.wait_for_capacity_s and lacks_workers(
            facts, phase, policy
        ):
            return _no_capacity(state, phase, policy, at)
        case Forming() if at > forming_due_at(phase, policy, moved):
            limit = form_limit_s(phase.origin, policy.timing)
            reads = checkpoint_of(phase.origin) is not None  # a mount that hangs raises nothing
            detail = f"the group did not form within {limit:.0f} s"
            cause = Cause(kind="storage" if reads else "silence", detail=detail)
            return break_group(state, cause, policy, at)
        case Pausing(purpose="stop", unsaved=float()):
            return _not_saved(state, phase, policy, at)
        case Pausing() if at > pause_due_at(facts, phase, policy, moved):
            quiet_s = at - max(phase.since, phase.heard, moved)
            if phase.purpose == "stop":
                return end_stopped(state, f"{phase.reason}; nothing was heard for {quiet_s:.0f} s")
            detail = f"the group did not reach a step boundary: nothing was heard for {quiet_s:.0f} s"
            return break_group(
                state, Cause(kind="silence", detail=detail, step=facts.lineage.step + 1), policy, at
            )
        case Settling() if at > settling_due_at(phase, policy, moved):
            return give_up_silent(state, policy, at)
        case Pausing():
            return resend_commands.pause(state, policy, at)
        case Running(preparation=Preparation(took=None) as made) if at > preparation.due_at(made, policy):
            cause = Cause(kind="silence", detail="nobody said that it is")
            event = NotPrepared(at=at, generation=facts.lineage.generation, number=made.number, cause=cause)
            return preparation.not_prepared(state, event)
        case Running() if resend_commands.has_to_begin(facts, phase, policy):
            return resend_commands.begin(state, policy, at, moved)
        case Running():
            return final_checkpoint.retry(state, policy, at, moved)
        case _:
            return Outcome(state=state)


def _not_saved(state: State, phase: Pausing, policy: Policy, at: float) -> Outcome:
    """Whose group is gone is recovered first; whose group stands there saves again."""
    if phase.broken or not {w.name for w in state.facts.membership.workers}.issuperset(phase.plan.workers):
        cause = Cause(kind="storage", detail="the checkpoint of a group that is gone could not be committed")
        return break_group(state, cause, policy, at)
    return save_again(state, policy, at)


def _no_capacity(state: State, phase: Waiting, policy: Policy, at: float) -> Outcome:
    there = len(present(state.facts.membership))
    why = f": {phase.problem}" if phase.problem and there >= policy.min_workers else ""
    return end(
        state,
        "capacity",
        f"waited {at - phase.since:.0f} s for {counted(policy.min_workers, 'worker')}{policy.each}, "
        f"{there} {'is' if there == 1 else 'are'} there{why}",
    )
