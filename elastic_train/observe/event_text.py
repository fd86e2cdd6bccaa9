"""Describe an event in one short clause. The controller's full reason stands beside it."""

from __future__ import annotations

from collections.abc import Sequence

from elastic_train.control.changes import Change
from elastic_train.control.events import (
    Adopted,
    CheckpointCommitted,
    FaultInjected,
    FinalReport,
    Node,
    NodesChanged,
    SaveRequested,
    StepCommitted,
    StopRequested,
    Straggling,
    TermBegan,
)
from elastic_train.observe.journal_records import Record
from elastic_train.observe.reconfigurations import Reconfiguration
from elastic_train.planner.plan import counted

Told = tuple[str, str, tuple[str, ...]]
"""A kind, a clause, and the nodes that it is about."""
MOST_NAMES = 3


def names(found: Sequence[str]) -> str:
    """Some names, and how many more there are."""
    more = len(found) - MOST_NAMES
    if more > 0:
        return f"{', '.join(found[:MOST_NAMES])} and {more} more"
    return " and ".join(filter(None, (", ".join(found[:-1]), *found[-1:])))


def place_in_page(entry: str) -> str:
    """Where to read on about what was said; nothing where there is no entry."""
    return f" (docs/errors.md#{entry})" if entry else ""


def storage_back(seconds: float) -> str:
    return f"storage takes checkpoints again, after {seconds:.0f} s"


def clause(record: Record, before: Sequence[Node], step: int) -> Told | None:
    """What a record says to a person; None for the usual course. `before` are the nodes known until then."""
    if record.ended is not None:
        outcome, detail = record.ended
        if isinstance(record.event, TermBegan):
            return "ended", detail, ()
        return "ended", _ended(outcome, detail, step), ()
    change = record.change
    if change is not None and change.kind == "collective" and isinstance(record.event, FinalReport):
        change = None  # how the others feel what was told before
    if isinstance(record.event, Adopted) and change is not None and change.kind == "takeover":
        return None  # its term has said so, and the first term of a run took nothing over
    if isinstance(record.event, StopRequested) and change is not None:
        return change.kind, f"{onset(change)}: {record.event.reason}", change.nodes
    if change is not None and change.kind != "resubmission":
        return change.kind, onset(change), change.nodes
    if record.formed is not None:
        group = record.formed
        state = {"fresh": "from the seed", "storage": "from the checkpoint"}.get(
            group.source, f"from {group.source} state"
        )
        at = f" of step {group.step}" if group.source != "fresh" else ""
        return "formed", f"forming {group.plan} {state}{at}", ()
    match record.event:
        case TermBegan(term=term, again=again):
            return "began", f"term {term} began" + (" in a new controller" if again else ""), ()
        case NodesChanged(nodes=nodes):
            return _nodes(nodes, before)
        case CheckpointCommitted(stored=stored):
            return "saved", f"saved step {stored.step}", ()
        case SaveRequested():
            return "asked", "a checkpoint is asked for", ()
        case StopRequested(reason=reason):
            return "asked", f"asked to stop: {reason}", ()
        case FaultInjected(what=what, nodes=nodes):
            return "chaos", f"chaos: {what}", nodes
        case Straggling(worker=worker, node=node, factor=factor):
            slow = f"is {factor:.1f} times slower than its peers" if factor >= 1 else "keeps up again"
            return "straggling", f"{worker} on node {node} {slow}", (node,)
        case StepCommitted(skipped=True):
            return "skipped", f"step {record.event.step} was not finite and is skipped", ()
        case _:
            return None


def onset(change: Change) -> str:
    """How a change begins."""
    who = names(change.workers) or "a worker"
    on = f" on node {names(change.nodes)}" if change.nodes else ""
    match change.kind:
        case "node_lost":
            return f"lost {who} with node {names(change.nodes)}"
        case "worker_lost":
            return f"lost {who}{on}" + (", as announced" if change.cause == "preemption" else "")
        case "silence":
            return f"{who}{on} fell silent"
        case "hang":
            return f"{who if change.workers else 'the group'}{on} hangs at step {change.step}"
        case "collective":
            return f"a collective broke on {who}"
        case "out_of_memory":
            return f"{who}{on} ran out of memory"
        case "user_error":
            return f"the job's own code raised on {who}"
        case "corruption":
            return f"{who}{on} holds other bits than its replicas"
        case "storage_trouble":
            return f"storage failed at step {change.step}"
        case "controller_fault":
            return "a fault of ours"
        case "takeover":
            return "a new controller took over"
        case "resubmission":
            return "submitted again"
        case "fenced":
            return "another controller owns the run"
        case "growth":
            return f"growing by {names(change.workers)}"
        case "shrink":
            return f"going on with fewer workers, because of {names(change.workers) or 'their speed'}"
        case "rebalance":
            return f"giving {names(change.workers) or 'everybody'} another share of the micro-batches"
        case "drain":
            return f"leaving node {names(change.nodes)}, which drains"
        case "eviction":
            return f"leaving node {names(change.nodes)}, which is slow"
        case "stop":
            return "stopping at the next step"


def outcome_of(done: Reconfiguration) -> tuple[str, str]:
    """What a change that is over came to: its kind, and a clause with its cost."""
    kind = done.kind or "unknown"
    if done.kind is None:
        cause = done.cause
    elif done.kind in (
        "growth",
        "shrink",
        "rebalance",
        "drain",
        "eviction",
        "stop",
        "takeover",
        "resubmission",
    ):
        said = {
            "growth": "grew",
            "shrink": "shrank",
            "rebalance": "rebalanced",
            "drain": f"left node {names(done.nodes)}",
        }
        cause = said.get(done.kind, done.cause)
    else:
        cause = onset(
            Change(kind=done.kind, nodes=done.nodes, workers=done.workers, step=done.step, cause=None)
        )
    workers = counted(done.after, "worker")
    size = workers if done.after == done.before else f"{done.before} -> {workers}"
    took = f", {done.seconds:.1f} s" if done.seconds is not None else ""
    return (
        f"{kind}_over",
        f"{cause}: {size}, {counted(done.lost, 'step')} lost{took}",
    )


def _nodes(nodes: Sequence[Node], before: Sequence[Node]) -> Told | None:
    known = {node.name: node for node in before}
    new = tuple(node.name for node in nodes if node.name not in known)
    leaving = tuple(
        node.name
        for node in nodes
        if node.drain_by is not None and (node.name not in known or known[node.name].drain_by is None)
    )
    gone = tuple(name for name in known if name not in {node.name for node in nodes})
    if leaving:
        return "notice", f"{_plural(leaving)} {_is(leaving)} to leave, with notice", leaving
    if new:
        return "joined", f"{_plural(new)} joined", new
    if gone:
        return "left", f"{_plural(gone)} {_is(gone)} gone", gone
    return None


def _plural(nodes: Sequence[str]) -> str:
    return f"node{'s' * (len(nodes) > 1)} {names(nodes)}"


def _is(nodes: Sequence[str]) -> str:
    return "are" if len(nodes) > 1 else "is"


def _ended(outcome: str, detail: str, step: int) -> str:
    said = {
        "finished": f"finished at step {step}",
        "stopped": detail,  # the step, why, and what is saved
        "user_error": f"ended at step {step} by an error of the job's own code",
        "infrastructure": f"ended at step {step}, infrastructure failed",
        "capacity": f"ended at step {step}, capacity did not come",
        "checkpoint": f"ended at step {step}, no checkpoint can be loaded",
        "fenced": "another controller owns the run",
    }
    return said.get(outcome, f"{outcome}: {detail}")
