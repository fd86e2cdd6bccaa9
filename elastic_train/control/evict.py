"""Evict a node that is slow, if `evict_slower_than` is set and the remaining steps are worth the switch.

It is left as a node that drains: the group pauses at a step boundary, what the slow worker holds is handed
on, and no step is lost. Afterwards the node is quarantined, and may come back.
"""

from __future__ import annotations

from dataclasses import replace

from elastic_train.control.events import Straggling
from elastic_train.control.forming import best_plan
from elastic_train.control.membership import quarantine
from elastic_train.control.planner_questions import to_change
from elastic_train.control.policy import Policy
from elastic_train.control.resize import change
from elastic_train.control.states import Outcome, Running, State
from elastic_train.control.switch_cost import expected_s
from elastic_train.planner.plan import Infeasible, Plan, counted
from elastic_train.planner.question import Planned


def evict(state: State, event: Straggling, policy: Policy) -> Outcome:
    """Leave the node of a straggler that is slow enough."""
    facts, phase = state.facts, state.phase
    limit = policy.evict_slower_than
    if limit is None or event.factor < limit or not isinstance(phase, Running):
        return Outcome(state=state)
    if event.node not in phase.plan.nodes or facts.lineage.step >= policy.max_steps:
        return Outcome(state=state)
    without = replace(
        facts, membership=replace(facts.membership, evicted=(*facts.membership.evicted, event.node))
    )
    planned = best_plan(to_change(without, phase, policy, event.at), policy)
    why = _why_not(state, phase.plan, planned, event.factor, policy)
    if why or isinstance(planned, Infeasible):
        return Outcome(state=state, reason=f"node {event.node} is kept: {why}")
    members, rest_s = quarantine(without.membership, event.node, policy, event.at, slow=True)
    reason = f"leaving {event.node} for {rest_s:.0f} s, which is slow, then form {planned.plan}"
    left = replace(state, facts=replace(facts, membership=members))
    return change(left, phase, planned, "drain", reason, policy, event.at)


def _why_not(state: State, now: Plan, then: Planned | Infeasible, factor: float, policy: Policy) -> str:
    """Everybody waits for the slowest: without it a step takes as much less, and the others do its part."""
    if isinstance(then, Infeasible):
        return then.reason
    facts, workers = state.facts, then.plan.world_size
    share = now.world_size / (workers * factor)  # of a step's time now
    saved_s = (policy.max_steps - facts.lineage.step) * facts.measured.step_s * (1.0 - share)
    cost_s = expected_s(facts.measured)
    if saved_s <= cost_s:
        return (
            f"{counted(workers, 'worker')} without it would save {max(saved_s, 0.0):.0f} s, "
            f"a switch takes {cost_s:.0f} s"
        )
    return ""
