"""Plan ahead: planner questions for the loss of a node and for workers that are starting."""

from __future__ import annotations

from dataclasses import replace

from elastic_train.control.planner_questions import to_change, to_form
from elastic_train.control.policy import Policy
from elastic_train.control.states import Running, State
from elastic_train.planner.question import Question


def likely(state: State, policy: Policy, at: float, turn: int) -> Question | None:
    """One question in each turn: the loss of each node of a running group, and then its growth.

    None where a run would not ask, as too few workers were left.
    """
    facts, phase = state.facts, state.phase
    if not isinstance(phase, Running):
        return None
    nodes = tuple(dict.fromkeys(phase.plan.nodes))
    which = turn % (len(nodes) + 1)
    if which < len(nodes):
        left = tuple(w for w in facts.membership.workers if w.node != nodes[which])
        question = to_form(
            replace(facts, membership=replace(facts.membership, workers=left)), phase.plan, policy, at
        )
    elif all(w.name in phase.plan.workers for w in facts.membership.workers):
        return None
    else:
        ready = tuple(replace(w, status="ready") for w in facts.membership.workers)
        question = to_change(
            replace(facts, membership=replace(facts.membership, workers=ready)), phase, policy, at
        )
    return question if len(question.worker_slots) >= policy.min_workers else None
