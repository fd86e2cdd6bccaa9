"""Failure handling: abort the group, collect final reports, find the cause, and recover or end the run.

The first sign aborts the group; the cause waits for every living member's final report. A cause that is not a
collective's explains those that are: a broken collective is how survivors feel somebody else's end. Then
either the run ends, because the job's own code raised, the failure is deterministic, or the budget is spent;
or it goes on with the workers that are left. What counts against the budget is decided in `incidents`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from elastic_train.control import incidents
from elastic_train.control.causes import CauseKind
from elastic_train.control.commands import Abort, StopWorker
from elastic_train.control.ending import end, end_by_user_error
from elastic_train.control.events import Cause, FinalReport, GroupBroken, Hung
from elastic_train.control.exceeded_plans import with_exceeded
from elastic_train.control.identity_cache import remembered
from elastic_train.control.membership import find, noticed, without, without_all
from elastic_train.control.policy import Policy
from elastic_train.control.sorted_names import entry, with_entry, with_name, without_entry, without_name
from elastic_train.control.states import (
    Facts,
    Failures,
    Forming,
    Outcome,
    Pausing,
    Running,
    Settling,
    State,
    Waiting,
    members,
)
from elastic_train.control.stopping import being_saved, broken_while_stopping
from elastic_train.control.storage_trouble import reported, spent, troubled
from elastic_train.planner.plan import counted
from elastic_train.recovery.evidence import Mixed
from elastic_train.recovery.lineage import alive

WALLS = ("engine", "memory", "hang")
"""Causes that come again where the run comes again, unlike the end of a machine."""


@remembered
def _ranks(workers: tuple[str, ...]) -> frozenset[str]:
    return frozenset(workers)


def nodes_lost(state: State, kinds: Mapping[str, CauseKind], policy: Policy, at: float) -> Outcome:
    """All workers of some nodes are lost at once: `kinds` says as what, by node."""
    phase, causes = state.phase, dict[str, Cause]()
    for worker in state.facts.membership.workers:
        if worker.node in kinds:
            kind, detail = kinds[worker.node], f"node {worker.node} is gone"
            causes[worker.name] = Cause(kind=kind, detail=detail, worker=worker.name, node=worker.node)
    if not causes:
        return Outcome(state=state)
    facts, notes = without_all(state.facts, causes, policy, at)
    said = [f"lost {name} ({cause.kind}: {cause.detail})" for name, cause in causes.items()]
    lost = Outcome(
        state=replace(state, facts=facts),
        commands=tuple(StopWorker(worker=name, reason="its node is gone") for name in causes),
        reason="; ".join((*said, *notes)),
    )
    inside = [causes[name] for name in members(phase) if name in causes]
    if inside and not isinstance(phase, Settling):
        lost = lost.then(lambda s: break_group(s, inside[0], policy, at))
    return lost.then(lambda s: _all_lost(s, causes))


def _all_lost(state: State, causes: Mapping[str, Cause]) -> Outcome:
    """Nobody waits for the final reports of those that are lost, and what ended them is a cause."""
    facts, phase = state.facts, state.phase
    if not isinstance(phase, Settling):
        for cause in causes.values():
            facts = incidents.explained(facts, cause)
        return Outcome(state=state if facts is state.facts else replace(state, facts=facts))
    group = set(phase.plan.workers).union(phase.pending)
    new = [cause for name, cause in causes.items() if name in group]
    pending = tuple(name for name in phase.pending if name not in causes)
    phase = replace(phase, pending=pending, causes=incidents.heard(phase.causes, *new))
    return Outcome(state=replace(state, phase=phase))


def worker_lost(state: State, name: str, cause: Cause, policy: Policy, at: float) -> Outcome:
    worker = find(state.facts.membership, name)
    if worker is None:
        return Outcome(state=state, reason=f"{name} is known to be gone")
    cause = replace(cause, worker=name, node=cause.node or worker.node)
    if worker.node in noticed(state.facts.membership) and cause.kind not in ("user", "memory", "engine"):
        cause = replace(cause, kind="preemption")
    if cause.kind == "user" and worker.status == "starting" and _trains(state):
        cause = replace(cause, kind="death")  # where the same code trains elsewhere, it is this machine
    if worker.lacks_room and cause.kind == "silence":
        cause = replace(cause, kind="preemption")  # of its room, by others
    facts, note = without(state.facts, worker, cause, policy, at)
    state = replace(state, facts=facts)
    if cause.kind == "user":
        return end_by_user_error(state, cause, name)
    if cause.kind == "storage" and worker.status == "starting":
        waits = isinstance(state.phase, Waiting)
        saves = troubled(facts.saves, cause.detail, policy, at, blocked=waits)
        state = replace(state, facts=replace(facts, saves=saves))
        if waits and spent(saves, policy):
            return end(state, "infrastructure", f"no worker starts: {reported(saves, at)}", cause=cause)
    lost = Outcome(
        state=state, reason="; ".join(filter(None, (f"lost {name} ({cause.kind}: {cause.detail})", note)))
    )
    phase = state.phase
    if isinstance(phase, Settling) and (name in _ranks(phase.plan.workers) or name in phase.pending):
        return lost.then(lambda s: _heard(s, name, cause))
    if name not in members(phase):
        return replace(lost, state=replace(state, facts=incidents.explained(state.facts, cause)))
    return lost.then(lambda s: break_group(s, cause, policy, at))


def _trains(state: State) -> bool:
    return any(worker.proven for worker in state.facts.membership.workers)


def group_broken(state: State, event: GroupBroken, policy: Policy) -> Outcome:
    if event.cause.kind == "user":
        return end_by_user_error(state, event.cause, event.worker)
    said = f"{event.worker} says: {event.cause.detail}"
    match state.phase:
        case Forming() | Running() | Pausing():
            return Outcome(state=state, reason=said).then(
                lambda s: break_group(s, event.cause, policy, event.at)
            )
        case Settling(causes=before) as phase if (causes := incidents.heard(before, event.cause)) != before:
            return Outcome(state=replace(state, phase=replace(phase, causes=causes)), reason=said)
        case _:
            return Outcome(state=state, reason=f"generation {event.generation} is known to be over")


def settled(state: State, event: FinalReport, policy: Policy) -> Outcome:
    """A final report. Before anybody asked for it, it is itself a sign that the group is over."""
    if find(state.facts.membership, event.worker) is None:
        return Outcome(state=state, reason=f"{event.worker} was given up before it settled")
    if event.error is not None and event.error.kind == "user":
        return end_by_user_error(state, event.error, event.worker)
    facts = _local_state(state.facts, event)
    state = state if facts is state.facts else replace(state, facts=facts)
    said = f"{event.worker} settled" + (f" ({event.error.detail})" if event.error else "")
    match state.phase:
        case Settling():
            return Outcome(state=_heard(state, event.worker, event.error).state, reason=said)
        case Pausing() as phase if event.error is None:
            if event.worker not in _ranks(phase.plan.workers):
                return Outcome(state=state, reason=said)
            settled = with_name(phase.settled, event.worker)
            if settled is phase.settled:
                return Outcome(state=state, reason=said)
            return Outcome(
                state=replace(state, phase=replace(phase, settled=settled, heard=event.at)), reason=said
            )
        case Running() if event.error is None and state.facts.lineage.step >= policy.max_steps:
            return Outcome(state=state, reason=f"{event.worker} ran the last step")
        case Forming() | Running() | Pausing() as phase if event.worker in members(phase):
            cause = event.error or Cause(kind="collective", detail=f"{event.worker} stopped by itself")
            return Outcome(state=state, reason=said).then(
                lambda s: break_group(s, cause, policy, event.at, spoken=(event.worker,))
            )
        case _:
            return Outcome(state=state, reason=f"{said} again")


def hung(state: State, event: Hung, policy: Policy) -> Outcome:
    """The group stands still: end the worker that holds it up, or break it where nobody stands out."""
    if not isinstance(state.phase, Running | Pausing):
        return Outcome(state=state, reason=f"{event.cause.detail}, but the group is over")
    if event.worker:
        lost = worker_lost(state, event.worker, event.cause, policy, event.at)
        stop = StopWorker(worker=event.worker, reason="it hung")
        return replace(lost, commands=(stop, *lost.commands))
    return break_group(state, event.cause, policy, event.at)


def break_group(
    state: State,
    cause: Cause,
    policy: Policy,
    at: float,
    *,
    spoken: tuple[str, ...] = (),
) -> Outcome:
    """Abort the group and wait for the final reports of its living members that haven't `spoken` yet."""
    state = _without_bad_logs(state, cause)
    facts, phase = state.facts, state.phase
    assert isinstance(phase, Forming | Running | Pausing)
    if isinstance(phase, Pausing) and phase.purpose == "stop" and being_saved(facts) is not None:
        return broken_while_stopping(state)
    if (
        isinstance(phase, Running)
        and facts.lineage.step >= policy.max_steps
        and _final_commit_is_ordered(facts, policy)
    ):
        return Outcome(
            state=state, reason="the last checkpoint is whole and on its way: nothing is left to recover"
        )
    if isinstance(phase, Pausing):
        spoken = (*spoken, *phase.settled)
    living, heard = {w.name for w in facts.membership.workers}, set(spoken)
    pending = tuple(sorted(name for name in members(phase) if name in living and name not in heard))
    generation = facts.lineage.generation
    settling = Settling(
        plan=phase.plan,
        since=at,
        pending=pending,
        causes=(cause,),
        formed=not isinstance(phase, Forming),
    )
    asked = counted(len(pending), "worker", ("is", "are"))
    return Outcome(
        state=replace(state, phase=settling),
        commands=(Abort(generation=generation, workers=pending),) if pending else (),
        reason=f"generation {generation} is over: {asked} asked for final reports",
    )


def _without_bad_logs(state: State, cause: Cause) -> State:
    """A replay that failed by itself would fail again: the next rung is taken."""
    facts, phase = state.facts, state.phase
    origin = phase.origin if isinstance(phase, Forming) else None
    if not isinstance(origin, Mixed) or not origin.replays or cause.kind not in ("engine", "memory"):
        return state
    survived = facts.survived
    survived = replace(survived, unreplayed=max(survived.unreplayed, origin.generation))
    return replace(state, facts=replace(facts, survived=survived))


def give_up_silent(state: State, policy: Policy, at: float) -> Outcome:
    """The deadline for final reports has passed: workers without one count as lost."""
    facts, phase = state.facts, state.phase
    assert isinstance(phase, Settling)
    causes = phase.causes
    hangs = any(cause.kind == "storage" for cause in causes)  # who reads from it can't even say so
    for name in phase.pending:
        worker = find(facts.membership, name)
        if worker is None:  # given up by another deadline
            continue
        kind: CauseKind = "preemption" if worker.node in noticed(facts.membership) else "silence"
        kind = "storage" if hangs else kind
        detail = f"{name} gave no final report within {policy.timing.settle_s:.0f} s"
        cause = Cause(kind=kind, detail=detail, worker=name, node=worker.node)
        causes = incidents.heard(causes, cause)
        facts, _ = without(facts, worker, cause, policy, at)
    return Outcome(
        state=State(facts=facts, phase=replace(phase, pending=(), causes=causes)),
        commands=tuple(StopWorker(worker=name, reason="it gave no final report") for name in phase.pending),
        reason=f"{', '.join(phase.pending)} gave no final report and count as lost",
    )


def verdict(state: State, policy: Policy, at: float) -> Outcome:
    """Every word is in: end the run, or go on with who is left."""
    facts, phase = state.facts, state.phase
    assert isinstance(phase, Settling)
    assert not phase.pending
    cause = incidents.main_cause(phase.causes)
    trusted = [c.trusted for c in phase.causes if c.trusted is not None]
    if trusted:
        suspect = (facts.lineage.generation, min(trusted))
        facts = replace(facts, survived=replace(facts.survived, suspect=suspect))
    stored = next((c for c in phase.causes if c.kind == "storage"), None)
    if stored is not None:
        saves = troubled(facts.saves, stored.detail, policy, at, blocked=True)
        facts = replace(facts, saves=saves)
        if spent(saves, policy):
            why = f"the run cannot go on: {reported(saves, at)}"
            return end(replace(state, facts=facts), "infrastructure", why, cause=stored)
    before, facts = facts.failures.ever, incidents.ended(facts, phase, policy)
    waiting = Waiting(since=at, prompt=True)
    if not incidents.is_charged(phase.causes):
        over = too_many_preemptions(facts.failures, policy)
        if over is not None and facts.stopping is None:
            return end(replace(state, facts=facts), "infrastructure", f"{over}: {cause.detail}", cause=cause)
        return Outcome(
            state=State(facts=facts, phase=waiting),
            reason=f"not counted as a failure: {cause.kind}, {cause.detail}",
        )
    failures = facts.failures
    walls = tuple(c for c in phase.causes if c.kind in WALLS)
    alone = failures.partial[1] if failures.partial else None
    exceeded = with_exceeded(failures.exceeded, phase.plan, phase.causes)
    # A plan that is found out to need too much is not chosen again: another one may do.
    escaped = exceeded != failures.exceeded
    again = (c for c in walls if not (escaped and c.peak))
    met = next((c for c in again if any(_same(e, c, alone) for e in failures.deterministic)), None)
    failures = replace(
        failures,
        last_step=max(failures.last_step, facts.lineage.step),
        deterministic=(*failures.deterministic, *walls),
        exceeded=exceeded,
    )
    state = State(facts=replace(facts, failures=failures), phase=waiting)
    if met is not None and met.kind == "memory":
        return end(
            state,
            "infrastructure",
            f"likely out of memory, twice{f' in {met.phase}' if met.phase else ''}: {met.detail}",
            cause=met,
        )
    if met is not None:
        return end(
            state, "infrastructure", f"the same fault twice at step {met.step}: {met.detail}", cause=met
        )
    if failures.ever == before:
        return Outcome(state=state, reason=f"cause: {cause.kind}, {cause.detail}; of the same incident")
    return _within_budget(state, cause, policy)


def too_many_preemptions(failures: Failures, policy: Policy) -> str | None:
    """What to say of it where machines were taken away more often than is borne."""
    if policy.preemptions is None or failures.preemptions <= policy.preemptions:
        return None
    count = f"{failures.preemptions} preemption{'s' * (failures.preemptions > 1)}"
    return f"{count}, max_preemption_failures={policy.preemptions}; the last"


def _within_budget(state: State, cause: Cause, policy: Policy) -> Outcome:
    """Whether the run may fail once more: without progress, and at the same step whatever came between."""
    failures = state.facts.failures
    step, times = failures.repeated
    count = f"{failures.count} failure{'s' * (failures.count > 1)} without progress between them"
    if failures.count <= policy.max_failures < times:
        count = f"{times} failures at step {step}, to which the run came again each time"
    if max(failures.count, times) > policy.max_failures:
        return end(
            state,
            "infrastructure",
            f"{count}, {policy.max_failures} are allowed; the last: {cause.detail}",
            cause=cause,
        )
    return Outcome(state=state, reason=f"cause: {cause.kind}, {cause.detail}; {count}")


def _same(earlier: Cause, cause: Cause, alone: int | None) -> bool:
    """Whether the run met the same wall twice. Memory runs out by phase, whatever the step.

    A step that others computed `alone` is one that the rank did not come to: its wall is in the next one.
    """
    if cause.kind == "memory":
        return earlier.kind == "memory" and earlier.phase == cause.phase
    if earlier.step != cause.step:
        behind = earlier.step == alone == cause.step - 1 and earlier.rank == cause.rank
        if not behind:
            return False
    if cause.kind == "hang":  # who hung, and for how long, differs
        return (earlier.kind, earlier.phase) == (cause.kind, cause.phase)
    return (earlier.kind, earlier.detail) == (cause.kind, cause.detail)


def _heard(state: State, name: str, error: Cause | None) -> Outcome:
    phase = state.phase
    assert isinstance(phase, Settling)
    causes = incidents.heard(phase.causes, error) if error is not None else phase.causes
    pending = without_name(phase.pending, name)
    if pending is phase.pending and causes == phase.causes:
        return Outcome(state=state)
    return Outcome(state=replace(state, phase=replace(phase, pending=pending, causes=causes)))


def _local_state(facts: Facts, event: FinalReport) -> Facts:
    """Note what a worker holds, and the newest step that its word proves committed."""
    steps = [h.step for h in event.local_states if alive(facts.lineage.chain, h.generation, h.step)]
    step = max((facts.lineage.step, *steps))
    kept, logs = facts.survived.local_states, facts.survived.logs
    known = entry(kept, event.worker) == event.local_states
    if known and step == facts.lineage.step and (not event.logs or entry(logs, event.worker) == event.logs):
        return facts
    kept = with_entry(kept, event.worker, event.local_states)
    logs = with_entry(logs, event.worker, event.logs) if event.logs else without_entry(logs, event.worker)
    return replace(
        facts,
        survived=replace(facts.survived, local_states=kept, logs=logs),
        lineage=replace(facts.lineage, step=step),
    )


def _final_commit_is_ordered(facts: Facts, policy: Policy) -> bool:
    return any(a.committing and a.step >= policy.max_steps for a in facts.saves.attempts)
