"""Classify the change of a transition from its event and the states before and after."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from elastic_train.control.causes import CauseKind
from elastic_train.control.changes import Change, ChangeKind
from elastic_train.control.events import (
    Adopted,
    Cause,
    CheckpointRejected,
    ControllerFailed,
    Event,
    FencedOff,
    FinalReport,
    GroupBroken,
    Hung,
    JournalHeldUp,
    NodesChanged,
    SaveFailed,
    Straggling,
    TermBegan,
    WorkerLost,
)
from elastic_train.control.identity_cache import remembered
from elastic_train.control.membership import find
from elastic_train.control.states import Ended, Facts, Forming, Pausing, Running, Settling, State
from elastic_train.planner.plan import Plan

_OF_CAUSE: dict[CauseKind, ChangeKind] = {
    "collective": "collective",
    "death": "worker_lost",
    "silence": "silence",
    "hang": "hang",
    "user": "user_error",
    "memory": "out_of_memory",
    "engine": "controller_fault",
    "preemption": "worker_lost",
    "corruption": "corruption",
    "storage": "storage_trouble",
    "damage": "storage_trouble",
    "restart": "takeover",
}


_said: Callable[[Plan], str] = remembered(str)


def change_of(before: State, event: Event, after: State) -> Change | None:
    """What a transition from `before` to `after` meant; None for the usual course of a run."""
    change = _of_event(before, event, after) or _of_phase(before, event, after)
    if change is None:
        return None
    return replace(
        change,
        step=change.step or after.facts.lineage.step,
        before=_plan_text(before),
        after=_plan_text(after),
    )


def _of_event(before: State, event: Event, after: State) -> Change | None:
    facts = before.facts
    match event:
        case TermBegan(again=again):
            if isinstance(before.phase, Ended):
                return Change(kind="resubmission")
            return Change(kind="takeover") if again else None
        case Adopted(running=running):
            there = {worker for worker, *_ in running}
            gone = tuple(worker for worker in _group(before) if worker not in there)
            return Change(kind="worker_lost", workers=gone) if gone else Change(kind="takeover")
        case NodesChanged():
            return _nodes_lost(before, after)
        case WorkerLost(worker=worker, cause=cause):
            return _of_cause(facts, worker, cause)
        case GroupBroken(worker=worker, cause=cause) | Hung(worker=worker, cause=cause):
            return _of_cause(facts, worker, cause)
        case FinalReport(worker=worker, error=Cause() as cause):
            return _of_cause(facts, worker, cause)
        case JournalHeldUp():
            return Change(kind="storage_trouble")
        case SaveFailed(step=step):
            return Change(kind="storage_trouble", step=step)
        case CheckpointRejected(stored=stored):
            return Change(kind="storage_trouble", step=stored.step)
        case ControllerFailed():
            return Change(kind="controller_fault")
        case FencedOff():
            return Change(kind="fenced")
        case _:
            return None


def _of_phase(before: State, event: Event, after: State) -> Change | None:
    """A group that is asked to pause says what for."""
    if not isinstance(after.phase, Pausing):
        return None
    if isinstance(before.phase, Pausing) and before.phase.purpose == after.phase.purpose:
        return None
    match after.phase.purpose:
        case "grow":
            idle = {w.name for w in after.facts.membership.workers} - set(after.phase.plan.workers)
            return Change(kind="growth", workers=tuple(sorted(idle)))
        case "shrink":
            slow = {name for name, _ in after.facts.membership.slow}
            return Change(kind="shrink", workers=tuple(sorted(slow.intersection(after.phase.plan.workers))))
        case "rebalance":
            return Change(kind="rebalance", workers=tuple(name for name, _ in after.facts.membership.slow))
        case "stop":
            return Change(kind="stop")
        case "drain" if isinstance(event, Straggling):
            return Change(kind="eviction", nodes=(event.node,))
        case "drain":
            leaving = {n.name for n in after.facts.membership.nodes if n.drain_by is not None}
            return Change(kind="drain", nodes=tuple(sorted(leaving & set(after.phase.plan.nodes))))


def _nodes_lost(before: State, after: State) -> Change | None:
    """Nodes whose workers went with them."""
    there = {worker.name for worker in after.facts.membership.workers}
    gone = [worker for worker in before.facts.membership.workers if worker.name not in there]
    if not gone:
        return None
    nodes = tuple(dict.fromkeys(worker.node for worker in gone))
    return Change(kind="node_lost", nodes=nodes, workers=tuple(worker.name for worker in gone))


def _of_cause(facts: Facts, worker: str, cause: Cause) -> Change:
    worker = worker or cause.worker
    known = find(facts.membership, worker)
    node = cause.node or (known.node if known is not None else "")
    return Change(
        kind=_OF_CAUSE[cause.kind],
        nodes=(node,) if node else (),
        workers=(worker,) if worker else (),
        rank=cause.rank,
        step=cause.step,
        cause=cause.kind,
    )


def _group(state: State) -> tuple[str, ...]:
    plan = _plan(state)
    return plan.workers if plan is not None else ()


def _plan(state: State) -> Plan | None:
    phase = state.phase
    return phase.plan if isinstance(phase, Forming | Running | Pausing | Settling) else None


def _plan_text(state: State) -> str:
    plan = _plan(state)
    return "" if plan is None else _said(plan)
