"""Incidents: group the reports of one failure, in any order, and count it once.

An incident begins with the first sign that a group is over. Everything that is heard until its members' last
words, and every loss of a member that only shows while the survivors form the next group, belongs to it.
Whether it counts is a function of the set of its causes: trouble of storage, a notice that was given and a
controller that was replaced are nobody's failure, and a collective explains nothing by itself. Incidents are
forgotten once a later group committed a step that all of its ranks had a part in: that is progress, wherever
the run had been before.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from elastic_train.control.causes import CauseKind
from elastic_train.control.events import Cause
from elastic_train.control.identity_cache import Carried
from elastic_train.control.policy import Policy
from elastic_train.control.states import Facts, Failures, Incident, Settling

LOSSES: Collection[CauseKind] = ("death", "silence")
FREE: Collection[CauseKind] = ("preemption", "storage", "damage", "restart")
"""What is charged to no machine."""

RANKS: tuple[CauseKind, ...] = (
    "user",
    "corruption",
    "engine",
    "memory",
    "hang",
    "death",
    "silence",
    "storage",
    "damage",
    "preemption",
    "restart",
    "collective",
)
"""Which of several causes is told: the one that explains the others."""


ONE_SAYS_ALL: Collection[CauseKind] = ("collective", "storage")
"""Of which every member of a group has its own to tell, and none says more than another."""


def heard(causes: tuple[Cause, ...], *more: Cause) -> tuple[Cause, ...]:
    """The causes of one incident with what else is heard of it. The same whichever came first; no longer than
    what ended, as of what everybody says one is kept.
    """
    for cause in more:
        if cause.kind in ONE_SAYS_ALL:
            same = next((c for c in causes if c.kind == cause.kind), None)
            if same is None:
                causes = (cause, *causes)
            elif _by_weight(cause) < _by_weight(same):
                causes = tuple(cause if c is same else c for c in causes)
        else:
            known = _known.take(causes)
            longer = causes if cause in known else (*causes, cause)
            known.add(cause)
            causes = _known.put(longer, known)
    return causes


_known: Carried[tuple[Cause, ...], set[Cause]] = Carried(set)


def _by_weight(cause: Cause) -> tuple[int, int, int, str, str]:
    return (RANKS.index(cause.kind), cause.step, cause.rank, cause.worker, cause.detail)


def main_cause(causes: tuple[Cause, ...]) -> Cause:
    """The cause that explains the others, the same whichever was heard first."""
    return min(causes, key=_by_weight)


def is_charged(causes: tuple[Cause, ...]) -> bool:
    """Whether what these causes ended is a failure."""
    reported = {cause.kind for cause in causes} - {"collective"}
    return not reported or not reported <= set(FREE)


def ended(facts: Facts, group: Settling, policy: Policy) -> Facts:
    """The facts once everybody's final report on a group is in."""
    lineage, failures = facts.lineage, facts.failures
    start = dict(lineage.chain).get(lineage.generation, 0)
    if lineage.step > start:  # somebody's final report may be the first to tell of the progress
        failures = progressed(failures, lineage.generation, lineage.step)
    new = Incident(
        generation=lineage.generation, members=group.plan.workers, causes=group.causes, at=group.since
    )
    known = failures.incidents
    if known and not group.formed and _same(known[-1], new, policy):
        known, new = known[:-1], _joined(known[-1], new)
    return replace(facts, failures=counted(failures, (*known, new), lineage.step))


def explained(facts: Facts, cause: Cause) -> Facts:
    """A member of the last group that ended is lost, as shows only now: that may be why it ended."""
    failures = facts.failures
    if not failures.incidents or cause.worker not in failures.incidents[-1].members:
        return facts
    *others, last = failures.incidents
    if any(c.kind != "collective" for c in last.causes):
        return facts
    incidents = (*others, replace(last, causes=(*last.causes, cause)))
    return replace(facts, failures=counted(failures, incidents, facts.lineage.step))


def noticed(causes: tuple[Cause, ...], leaving: Collection[str]) -> tuple[Cause, ...]:
    """The causes where losses on nodes that were about to leave are what had been announced."""
    if not any(_was_leaving(cause, leaving) for cause in causes):
        return causes
    return tuple(replace(c, kind="preemption") if _was_leaving(c, leaving) else c for c in causes)


def notice(facts: Facts, leaving: Collection[str]) -> Facts:
    """Nodes are about to leave: what their loss was charged with, before the notice was heard, is not."""
    failures = facts.failures
    incidents = tuple(replace(i, causes=noticed(i.causes, leaving)) for i in failures.incidents)
    if incidents == failures.incidents:
        return facts
    return replace(facts, failures=counted(failures, incidents, facts.lineage.step))


def progressed(failures: Failures, generation: int, step: int) -> Failures:
    """A generation committed a step: what ended groups before it is over, if all of its ranks had a part in
    it. What ended them may be a rank that is still given its state.
    """
    if failures.partial == (generation, step):
        return failures
    left = tuple(i for i in failures.incidents if i.generation >= generation)
    if len(left) == len(failures.incidents):
        return failures
    return replace(failures, incidents=left, count=_count(left))


def counted(failures: Failures, incidents: tuple[Incident, ...], step: int) -> Failures:
    """The failures with these incidents instead of those that were known, where the run stands at `step`."""
    count = _count(incidents)
    more = count - failures.count
    preempted = sum(map(_is_preemption, incidents)) - sum(map(_is_preemption, failures.incidents))
    at, times = failures.repeated
    if more > 0:
        at, times = step, (times if at == step else 0) + more
    return replace(
        failures,
        incidents=incidents,
        count=count,
        ever=failures.ever + more,
        preemptions=failures.preemptions + preempted,
        repeated=(at, times if more >= 0 else max(times + more, 0)),
    )


def _count(incidents: tuple[Incident, ...]) -> int:
    return sum(is_charged(incident.causes) for incident in incidents)


def _is_preemption(incident: Incident) -> bool:
    return not is_charged(incident.causes) and any(c.kind == "preemption" for c in incident.causes)


def _same(first: Incident, then: Incident, policy: Policy) -> bool:
    """Whether a group that was forming ended by what had ended the group before.

    That is, by losses of members of that group, within the time in which every loss shows.
    """
    lost = {c.worker for c in then.causes if c.kind != "collective"}
    reported = {c.kind for c in (*first.causes, *then.causes)} - {"collective"}
    shows_s = policy.timing.liveness_s + policy.timing.settle_s
    return (
        bool(lost)
        and lost <= set(first.members)
        and reported <= {*LOSSES, "preemption"}
        and then.at - first.at <= shows_s
    )


def _joined(first: Incident, then: Incident) -> Incident:
    return replace(first, generation=then.generation, causes=(*first.causes, *then.causes))


def _was_leaving(cause: Cause, leaving: Collection[str]) -> bool:
    return cause.kind in LOSSES and cause.node in leaving and bool(cause.worker)
