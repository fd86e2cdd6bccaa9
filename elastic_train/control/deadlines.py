"""Time: the deadlines of every phase. Nothing else judges a deadline."""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from elastic_train.config import Timing
from elastic_train.control.checkpoint_saving import retry_final
from elastic_train.control.commands import StopWorker
from elastic_train.control.ending import end
from elastic_train.control.events import Cause, Tick
from elastic_train.control.failure import break_group, give_up_silent
from elastic_train.control.membership import staff, starting, without, worker_slots
from elastic_train.control.planner_questions import last_plan
from elastic_train.control.policy import Policy
from elastic_train.control.states import (
    Ended,
    Facts,
    Forming,
    Outcome,
    Pausing,
    Phase,
    Running,
    Settling,
    State,
    Waiting,
)
from elastic_train.control.stopping import end_stopped
from elastic_train.recovery.evidence import Mixed, Origin

PAUSE_STEPS = 3
"""Step times that a pause may take beside the settling time."""


def tick(state: State, event: Tick, policy: Policy) -> Outcome:
    outcome = Outcome(state=state)
    if event.late > policy.late_ticks * policy.tick_s:
        outcome = Outcome(
            state=shifted(state, event.late),
            reason=f"the controller stood still for {event.late:.1f} s: deadlines are moved",
        )
    return (
        outcome.then(lambda s: _late_starts(s, policy, event.at))
        .then(lambda s: _deadline(s, policy, event.at))
        .then(lambda s: staff(s, policy, event.at))
    )


def shifted(state: State, seconds: float) -> State:
    """The state as if it had been reached `seconds` later: time that nobody watched doesn't count."""

    def later(at: float | None) -> float | None:
        return None if at is None else at + seconds

    facts = state.facts
    facts = replace(
        facts,
        workers=tuple(replace(w, since=w.since + seconds) for w in facts.workers),
        flaps=tuple(
            replace(f, ends=tuple(t + seconds for t in f.ends), until=f.until + seconds) for f in facts.flaps
        ),
        save_asked=later(facts.save_asked),
        began=later(facts.began),
        resized=later(facts.resized),
    )
    return State(facts=facts, phase=_shifted_phase(state.phase, seconds), now=state.now + seconds)


def _shifted_phase(phase: Phase, seconds: float) -> Phase:
    match phase:
        case Waiting(paused=paused) | Forming(paused=paused):
            paused = None if paused is None else paused + seconds
            return replace(phase, since=phase.since + seconds, paused=paused)
        case Running(final_failed=failed, declined=declined):
            failed = None if failed is None else failed + seconds
            return replace(
                phase,
                since=phase.since + seconds,
                final_since=phase.final_since + seconds,
                final_failed=failed,
                declined=None if declined is None else replace(declined, at=declined.at + seconds),
            )
        case Pausing() | Settling():
            return replace(phase, since=phase.since + seconds)
        case Ended():
            return phase
    assert_never(phase)


def form_limit_s(origin: Origin, timing: Timing) -> float:
    """Seconds that forming a group may take. Steps that are replayed count as steps."""
    replays = isinstance(origin, Mixed) and origin.replays
    return timing.form_s + (timing.progress_s if replays else 0.0)


def _late_starts(state: State, policy: Policy, at: float) -> Outcome:
    """Give up workers that take too long to start."""
    facts = state.facts
    late = [
        w for w in facts.workers if w.status == "starting" and at - w.since > policy.timing.start_worker_s
    ]
    notes: list[str] = []
    for worker in late:
        cause = Cause(kind="silence", detail=f"{worker.name} did not start")
        facts, note = without(facts, worker, cause, policy, at)
        limit = f"{worker.name} did not start on {worker.node} within {policy.timing.start_worker_s:.0f} s"
        notes += filter(None, (limit, note))
    if not late:
        return Outcome(state=state)
    return Outcome(
        state=replace(state, facts=facts),
        commands=tuple(StopWorker(worker=w.name, reason="it took too long to start") for w in late),
        reason="; ".join(notes),
    )


def _deadline(state: State, policy: Policy, at: float) -> Outcome:
    facts, phase, timing = state.facts, state.phase, policy.timing
    match phase:
        case Waiting() if at - phase.since > timing.wait_for_capacity_s and not _on_their_way(facts, policy):
            return _no_capacity(state, phase, policy, at)
        case Forming() if at - phase.since > (limit := form_limit_s(phase.origin, timing)):
            cause = Cause(kind="silence", detail=f"the group did not form within {limit:.0f} s")
            return break_group(state, cause, policy, at)
        case Pausing() if at - phase.since > timing.settle_s + PAUSE_STEPS * facts.step_s:
            if phase.purpose == "stop":
                return end_stopped(state, f"{phase.reason}; not everything was done in time")
            cause = Cause(kind="silence", detail="the group did not reach a step boundary in time")
            return break_group(state, cause, policy, at)
        case Settling() if at - phase.since > timing.settle_s:
            return give_up_silent(state, policy, at)
        case Running():
            return retry_final(state, policy, at)
        case _:
            return Outcome(state=state)


def _on_their_way(facts: Facts, policy: Policy) -> bool:
    """Whether there is capacity, and only the start of its workers is waited for: that has its own limit."""
    coming = starting(facts)
    return bool(coming) and len(coming) + len(worker_slots(facts, last_plan(facts))) >= policy.min_workers


def _no_capacity(state: State, phase: Waiting, policy: Policy, at: float) -> Outcome:
    present = len(worker_slots(state.facts, last_plan(state.facts)))
    why = f": {phase.problem}" if phase.problem and present >= policy.min_workers else ""
    return end(
        state,
        "capacity",
        f"waited {at - phase.since:.0f} s for {policy.min_workers} workers{policy.each}, "
        f"{present} are there{why}",
    )
