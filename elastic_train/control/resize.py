"""Growth, drains and other shares for slow workers: a graceful switch of a running group, at a step boundary.

Joiners are up before the group pauses, so a pause is the switch only. Whether a change is worth its switch is
the planner's to say, from what the run measured; what was declined is asked again as time passes, because
quiet times grow longer. A growth waits until nobody joined for
the join window, so that arrivals come in one batch, and after a switch for a cool-down of four join windows
and ten times what the last switch took: capacity that comes and goes costs at most a tenth of the time. The
fewer of the possible workers run, the more a wait costs, so the cool-down is shortened to their share.
Failures have no cool-down. A node that leaves with notice is left as soon as its workers can be replaced, and
at the latest when its deadline is near; several notices are merged into one pause. A worker that computes
slower than its peers gets fewer micro-batches, and as many as they again once it keeps up.
"""

from __future__ import annotations

from dataclasses import replace

from elastic_train.control import preparation
from elastic_train.control.commands import Pause
from elastic_train.control.failure import too_many_preemptions
from elastic_train.control.forming import best_plan
from elastic_train.control.membership import draining, keep_all_nodes, noticed, present, starting
from elastic_train.control.planner_questions import to_change
from elastic_train.control.policy import Policy
from elastic_train.control.states import (
    Declined,
    Facts,
    Failures,
    Outcome,
    Pausing,
    Preparation,
    Purpose,
    Running,
    State,
    Waiting,
)
from elastic_train.control.stopping import begin_stop
from elastic_train.planner.plan import Infeasible, Plan
from elastic_train.planner.question import Planned

COOL_DOWN_WINDOWS = 4
COOL_DOWN_SWITCHES = 10
ASKED_AGAIN_S = 60.0
"""Until a change that was declined is judged again; then as long as the group has trained by then."""


def consider(state: State, policy: Policy, at: float) -> Outcome:
    """Pause a running group if a node leaves or a larger plan is worth it."""
    facts, phase = state.facts, state.phase
    assert isinstance(phase, Running)
    made = phase.preparation
    if facts.lineage.step >= policy.max_steps:
        if made is None:
            return Outcome(state=state)
        phase = replace(phase, preparation=None)
        return Outcome(state=replace(state, phase=phase), reason="no step is left for the group made ready")
    if made is not None:
        return _go_over(state, phase, made, policy, at)
    if not draining(facts.membership).isdisjoint(phase.plan.nodes):
        return _leave(state, phase, policy, at)
    return _improve(state, phase, policy, at)


def _go_over(state: State, phase: Running, made: Preparation, policy: Policy, at: float) -> Outcome:
    """Pause once the next group is ready, unless what it was decided on has changed by then."""
    facts = state.facts
    if not preparation.holds(made, facts):
        dropped = Outcome(
            state=replace(state, phase=replace(phase, preparation=None)),
            reason="what is being made ready is forgotten: others are there now",
        )
        return dropped.then(lambda s: consider(s, policy, at))
    if made.took is not None:
        return pause(state, phase.plan, made.purpose, made.reason, at, prepared=made)
    if made.purpose == "drain" and _is_near(facts, phase.plan, policy, at):
        return pause(state, phase.plan, made.purpose, f"{made.reason}; nobody waits to be ready", at)
    return Outcome(state=state)


def paused(state: State, policy: Policy, at: float) -> Outcome:
    """Once the whole group stands at one step, it is over and the next one is formed."""
    facts, phase = state.facts, state.phase
    assert isinstance(phase, Pausing)
    if facts.lineage.step >= policy.max_steps:
        facts = replace(facts, membership=keep_all_nodes(facts.membership))
        running = Running(plan=phase.plan, since=at, proven=True, final_since=at)
        return Outcome(
            state=State(facts=facts, phase=running),
            reason="the last step was committed before the pause",
        )
    if len(phase.settled) < len(phase.plan.workers):
        return Outcome(state=state)
    if phase.purpose == "drain":
        facts = replace(facts, failures=_preempted(facts, phase.plan))
    waiting = Waiting(since=at, prompt=True, paused=phase.stands, prepared=phase.prepared)
    return Outcome(
        state=replace(state, facts=facts, phase=waiting),
        reason=f"the group stands at step {facts.lineage.step}",
    )


def _preempted(facts: Facts, plan: Plan) -> Failures:
    """The failures where nodes of the group are left because they are taken away, and not for being slow."""
    if noticed(facts.membership).isdisjoint(plan.nodes):
        return facts.failures
    return replace(facts.failures, preemptions=facts.failures.preemptions + 1)


def _leave(state: State, phase: Running, policy: Policy, at: float) -> Outcome:
    facts = state.facts
    leaving = draining(facts.membership)
    near = _is_near(facts, phase.plan, policy, at)
    question = to_change(facts, phase, policy, at)
    replaced = len(question.worker_slots) >= min(phase.plan.world_size, policy.max_workers)
    planned = best_plan(question, policy)
    save = isinstance(planned, Infeasible)
    if not near and (save or (starting(facts.membership) and not replaced)):
        return Outcome(state=state)
    names = ", ".join(sorted(leaving & set(phase.plan.nodes)))
    over = too_many_preemptions(_preempted(facts, phase.plan), policy)
    if over is not None:
        facts = replace(facts, stopping=f"{over}: {names}", stops_as="infrastructure")
        return begin_stop(replace(state, facts=facts), policy, at)
    if isinstance(planned, Infeasible):
        reason = f"leaving {names}, then wait, because {planned.reason}"
        return pause(state, phase.plan, "drain", reason, at, save=True)
    reason = f"leaving {names}, then form {planned.plan}"
    if near:
        return pause(state, phase.plan, "drain", reason, at)
    return change(state, phase, planned, "drain", reason, policy, at)


def _is_near(facts: Facts, plan: Plan, policy: Policy, at: float) -> bool:
    """Whether a node of the group has to be left now. One that is left for being slow may stay."""
    notices = [n.drain_by for n in facts.membership.nodes if n.drain_by is not None and n.name in plan.nodes]
    return bool(notices) and min(notices) - at <= policy.timing.settle_s


def _improve(state: State, phase: Running, policy: Policy, at: float) -> Outcome:
    """Go over to a plan that is worth it: with workers that came, or in shares after what each can do."""
    facts, members = state.facts, set(phase.plan.workers)
    slow = tuple(sorted((name, factor) for name, factor in facts.membership.slow if name in members))
    room = phase.plan.world_size < policy.max_workers
    balanced = not slow and not _uneven(phase.plan)
    if balanced and (not room or members.issuperset(worker.name for worker in present(facts.membership))):
        return Outcome(state=state)
    question = to_change(facts, phase, policy, at)
    idle = tuple(slot.worker for slot in question.worker_slots if slot.worker not in members)
    asked = Declined(idle=idle if room else (), slow=slow, at=at)
    if balanced and not asked.idle:
        return Outcome(state=state)
    share = phase.plan.world_size / max(1, question.room)
    if _is_declined(phase, asked) or not _calm(facts, asked, policy, share):
        return Outcome(state=state)
    planned = best_plan(question, policy)
    if isinstance(planned, Infeasible) or planned.plan == phase.plan:
        what = "the group does not grow" if asked.idle else "shares stay as they are"
        return Outcome(
            state=replace(state, phase=replace(phase, declined=asked)),
            reason=f"{what}: {planned.reason}",
            planned=planned.reason,
        )
    why = f": {planned.reason}" if planned.reason else ""
    if members.issuperset(planned.plan.workers):
        who = ", ".join(f"{name} is {factor:.1f} times slower" for name, factor in slow) or "all keep up"
        if left_out := members.difference(planned.plan.workers):
            reason = f"{who}: going on as {planned.plan} without {', '.join(sorted(left_out))}{why}"
            return change(state, phase, planned, "shrink", reason, policy, at, asked)
        lengths = ", ".join(str(len(part)) for part in planned.plan.shares)
        reason = f"{who}: shares of {lengths} micro-batches{why}"
        return change(state, phase, planned, "rebalance", reason, policy, at, asked)
    reason = f"growing from {phase.plan} to {planned.plan}{why}"
    return change(state, phase, planned, "grow", reason, policy, at, asked)


def _uneven(plan: Plan) -> bool:
    """Whether some worker has less to do than a whole division would give it."""
    lengths = [len(share) for share in plan.shares]
    return max(lengths) - min(lengths) > 1


def _is_declined(phase: Running, asked: Declined) -> bool:
    said = phase.declined
    if said is None or (said.idle, said.slow) != (asked.idle, asked.slow):
        return False
    return asked.at - said.at < max(ASKED_AGAIN_S, said.at - phase.since)


def _calm(facts: Facts, asked: Declined, policy: Policy, share: float) -> bool:
    """Whether arrivals are over and the last switch is far enough away; `share` of the workers run."""
    window, at = policy.timing.join_window_s, asked.at
    arrived = set(asked.idle)
    if any(at - worker.since < window for worker in facts.membership.workers if worker.name in arrived):
        return False
    cool_down = (COOL_DOWN_WINDOWS * window + COOL_DOWN_SWITCHES * facts.measured.switch_s) * share
    return facts.measured.resized is None or at - facts.measured.resized >= cool_down


def change(
    state: State,
    phase: Running,
    planned: Planned,
    purpose: Purpose,
    reason: str,
    policy: Policy,
    at: float,
    asked: Declined | None = None,
) -> Outcome:
    """Go over to a plan: it is made ready first where that is of use, and else the group pauses at once."""
    if preparation.is_worth_it(state.facts, phase, planned, policy):
        return preparation.begin(state, phase, planned, purpose, reason, at, asked=asked)
    return pause(state, phase.plan, purpose, reason, at)


def pause(
    state: State,
    plan: Plan,
    purpose: Purpose,
    reason: str,
    at: float,
    *,
    save: bool = False,
    prepared: Preparation | None = None,
) -> Outcome:
    return Outcome(
        state=replace(
            state,
            phase=Pausing(
                plan=plan,
                since=at,
                heard=at,
                stands=at,
                purpose=purpose,
                reason=reason,
                save=save,
                prepared=prepared,
            ),
        ),
        commands=(Pause(generation=state.facts.lineage.generation, save=save),),
        reason=reason,
    )
