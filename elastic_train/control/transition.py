"""The controller as a function: (state, event, policy) -> (state, commands, reason).

Facts of the cluster and of storage count from any sender; reports of workers count only for the current
generation. What follows from the new facts in the phase that the run is in is decided by `_follow`,
until nothing more follows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from elastic_train.control import incidents, preparation
from elastic_train.control.adoption import adopted, term_began
from elastic_train.control.causes import CauseKind
from elastic_train.control.checkpoint_saving import (
    checkpoint_committed,
    checkpoint_rejected,
    part_written,
    peers_held,
    save_failed,
    save_requested,
)
from elastic_train.control.classify_change import change_of
from elastic_train.control.commands import StopWorker
from elastic_train.control.committed_steps import step_committed
from elastic_train.control.deadlines import shifted, tick
from elastic_train.control.ending import end
from elastic_train.control.events import (
    Adopted,
    Cause,
    CheckpointCommitted,
    CheckpointRejected,
    ControllerFailed,
    Event,
    FaultInjected,
    FencedOff,
    FinalReport,
    GroupBroken,
    GroupReady,
    Hung,
    JournalDurable,
    JournalHeldUp,
    LacksRoom,
    LogRead,
    NodesChanged,
    NotPrepared,
    PartWritten,
    PeersHeld,
    PeersReported,
    Prepared,
    SaveFailed,
    SaveRequested,
    StepCommitted,
    StopRequested,
    Straggling,
    TermBegan,
    Tick,
    WorkerLost,
    WorkerReady,
)
from elastic_train.control.evict import evict
from elastic_train.control.failure import group_broken, hung, nodes_lost, settled, verdict, worker_lost
from elastic_train.control.forming import group_ready, peers_reported, try_form
from elastic_train.control.membership import find, lacks_room, ready, staff, straggling
from elastic_train.control.policy import Policy
from elastic_train.control.resize import consider, paused
from elastic_train.control.states import Ended, Forming, Outcome, Pausing, Running, Settling, State, Waiting
from elastic_train.control.stopping import begin_stop, stop, try_stop
from elastic_train.control.storage_trouble import journal_durable, journal_held_up
from elastic_train.control.unanswered_commits import log_read
from elastic_train.planner.plan import counted


def transition(state: State, event: Event, policy: Policy) -> Outcome:
    """What the run does next. An outcome with the same state object and no commands changed nothing."""
    back_s = state.now - event.at
    if back_s > policy.late_ticks * policy.tick_s and not isinstance(event, TermBegan):
        state = shifted(state, -back_s)  # the clock went back
    outcome = _decide(state, event, policy.within(state.facts.lineage.ended))
    idle = outcome.state is state and not isinstance(event, Tick)
    while not (idle or isinstance(event, TermBegan)):
        before = outcome.state
        outcome = outcome.then(lambda s: _follow(s, policy.within(s.facts.lineage.ended), event.at))
        if type(outcome.state.phase) is type(before.phase):
            break
    outcome = preparation.forgotten(state, outcome)
    after = outcome.state
    if after is not state:
        after = State(facts=after.facts, phase=after.phase, now=event.at)
    return replace(
        outcome,
        state=after,
        reason=outcome.reason or "nothing to do",
        change=change_of(state, event, after),
    )


def _decide(state: State, event: Event, policy: Policy) -> Outcome:
    generation = state.facts.lineage.generation
    if isinstance(state.phase, Ended) and not isinstance(event, TermBegan):
        return Outcome(state=state, reason=f"the run is over: {state.phase.outcome}")
    match event:
        case TermBegan():
            return term_began(state, event, policy)
        case NodesChanged():
            return _nodes_changed(state, event, policy)
        case WorkerReady():
            return _worker_ready(state, event)
        case LacksRoom():
            return lacks_room(state, event)
        case JournalHeldUp(problem=problem):
            return journal_held_up(state, problem, policy, event.at)
        case JournalDurable():
            return journal_durable(state)
        case WorkerLost(worker=worker, cause=cause):
            lost = worker_lost(state, worker, cause, policy, event.at)
            return lost.then(lambda s: staff(s, policy, event.at))
        case Adopted():
            return adopted(state, event, policy)
        case PartWritten():
            return part_written(state, event, policy)
        case SaveFailed():
            return save_failed(state, event, policy)
        case PeersHeld():
            return peers_held(state, event)
        case CheckpointCommitted():
            return checkpoint_committed(state, event, policy)
        case CheckpointRejected():
            return checkpoint_rejected(state, event, policy)
        case ControllerFailed(detail=detail):
            cause = Cause(kind="engine", detail=detail.rstrip().rpartition("\n")[2])
            return end(state, "infrastructure", detail, cause=cause)
        case FencedOff(by_term=term):
            return end(state, "fenced", f"term {term} owns the run now")
        case LogRead():
            return log_read(state, event, policy)
        case SaveRequested():
            return save_requested(state, event)
        case StopRequested():
            return stop(state, event, policy)
        case FaultInjected(what=what):
            return Outcome(state=replace(state), reason=f"chaos: {what}")
        case Tick():
            return tick(state, event, policy)
        case (
            GroupReady()
            | Prepared()
            | NotPrepared()
            | StepCommitted()
            | PeersReported()
            | GroupBroken()
            | Hung()
            | Straggling()
            | FinalReport()
        ) if event.generation != generation:
            return Outcome(state=state, reason=f"fenced: generation {event.generation} is gone")
        case GroupReady():
            return group_ready(state, event, policy)
        case Prepared():
            return preparation.prepared(state, event)
        case NotPrepared():
            return preparation.not_prepared(state, event)
        case PeersReported():
            return peers_reported(state, event)
        case StepCommitted():
            return step_committed(state, event, policy)
        case GroupBroken():
            return group_broken(state, event, policy)
        case Hung():
            return hung(state, event, policy)
        case Straggling():
            return straggling(state, event).then(lambda s: evict(s, event, policy))
        case FinalReport():
            return settled(state, event, policy)
    assert_never(event)


def _follow(state: State, policy: Policy, at: float) -> Outcome:
    """What follows from the facts in this phase, by itself."""
    match state.phase:
        case Waiting():
            return try_form(state, policy, at)
        case Running():
            if state.facts.stopping is not None:
                return begin_stop(state, policy, at)
            return consider(state, policy, at)
        case Pausing(purpose="stop"):
            return try_stop(state, policy)
        case Pausing():
            return paused(state, policy, at)
        case Settling(pending=()):
            return verdict(state, policy, at)
        case Forming() | Settling() | Ended():
            return Outcome(state=state)
    assert_never(state.phase)


def _nodes_changed(state: State, event: NodesChanged, policy: Policy) -> Outcome:
    """Workers go with their node; new room is filled."""
    before = {node.name: node for node in state.facts.membership.nodes}
    names = {node.name for node in event.nodes}
    notices = [n.name for n in event.nodes if n.drain_by is not None and before.get(n.name) != n]
    state = _with_nodes(state, event)
    outcome = Outcome(
        state=state,
        reason=counted(len(names), "node")
        + (f", {', '.join(notices)} leaving" if notices else "")
        + _lacking(state, event, policy),
    )
    used = {worker.node for worker in state.facts.membership.workers}
    missing = used - names
    if missing == used:
        # One observer that sees nobody is likelier to be cut off than all machines at once: who is gone falls
        # silent, too. What was announced is believed.
        doubted = missing - {name for name, node in before.items() if node.drain_by is not None}
        missing -= doubted
        if doubted:
            kept = f"nobody sees {', '.join(sorted(doubted))}: workers are kept until they fall silent"
            outcome = replace(outcome, reason=f"{outcome.reason}; {kept}")
    kinds: dict[str, CauseKind] = {}
    for name in missing:
        left = before.get(name)
        kinds[name] = "preemption" if left is not None and left.drain_by is not None else "death"
    outcome = outcome.then(lambda s: nodes_lost(s, kinds, policy, event.at))
    return outcome.then(lambda s: staff(s, policy, event.at))


def _with_nodes(state: State, event: NodesChanged) -> State:
    """The state that knows of the nodes. A notice may be heard after the loss that it announced."""
    names = {node.name for node in event.nodes}
    leaving = frozenset(node.name for node in event.nodes if node.drain_by is not None)
    facts, measured = state.facts, state.facts.measured
    held = tuple(held for held in measured.peer_memory if held.node in names)
    facts = replace(
        facts,
        membership=replace(facts.membership, nodes=event.nodes),
        measured=replace(measured, peer_memory=held),
    )
    if leaving:
        facts = incidents.notice(facts, leaving)
    phase = state.phase
    if leaving and isinstance(phase, Settling):
        phase = replace(phase, causes=incidents.noticed(phase.causes, leaving))
    return replace(state, facts=facts, phase=phase)


def _lacking(state: State, event: NodesChanged, policy: Policy) -> str:
    """What is waited for, where the cluster has too little room."""
    room = sum(node.slots for node in event.nodes if node.drain_by is None)
    if not isinstance(state.phase, Waiting) or room >= policy.min_workers:
        return ""
    return (
        f" with room for {counted(room, 'worker')}{policy.each}: at least {policy.min_workers} are waited for"
    )


def _worker_ready(state: State, event: WorkerReady) -> Outcome:
    worker = find(state.facts.membership, event.worker)
    if worker is None:
        return Outcome(
            state=state,
            commands=(StopWorker(worker=event.worker, reason="it came after it was given up"),),
            reason=f"{event.worker} came after it was given up",
        )
    if worker.status == "ready":
        return Outcome(state=state, reason=f"{event.worker} is known to be ready")
    members = ready(state.facts.membership, event.worker, event.at)
    return Outcome(
        state=replace(state, facts=replace(state.facts, membership=members)),
        reason=f"{event.worker} is ready on {event.node}",
    )
