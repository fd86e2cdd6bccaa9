"""Make the next group ready while the present one trains, so that a pause only swaps: make before break.

Members of the next group meet and connect beside the running one, and newcomers build their model. Whoever
comes, goes or fails meanwhile leaves the running group as it was: the preparation is forgotten and the change
is judged anew. One that fails by itself is not tried again with the same workers; their change goes without.
"""

from __future__ import annotations

from dataclasses import replace

from elastic_train.control.commands import Dismiss, Form, Prepare
from elastic_train.control.events import NotPrepared, Prepared
from elastic_train.control.keep_ranks import keep_places
from elastic_train.control.membership import at_hand, draining, present
from elastic_train.control.policy import Policy
from elastic_train.control.states import (
    Declined,
    Facts,
    Outcome,
    Pausing,
    Phase,
    Preparation,
    Purpose,
    Running,
    State,
    Waiting,
)
from elastic_train.planner.question import Planned

GENERATIONS_PER_TERM = 1000
"""Generations of a term are numbered from here on, so that a predecessor that hasn't noticed its end yet
forms none with the same number, and writes into no directory of its successor."""


def next_generation(facts: Facts) -> int:
    """The number of the group that forms next."""
    return max(facts.lineage.generation, (facts.term - 1) * GENERATIONS_PER_TERM) + 1


def is_worth_it(facts: Facts, phase: Running, planned: Planned, policy: Policy) -> bool:
    """Whether a change begins with a preparation: where a group trains well, and none failed with the same
    workers.
    """
    tried = phase.unprepared is not None and phase.unprepared == _present(facts)
    return policy.prepares and phase.proven and planned.plan.world_size > 1 and not tried


def begin(
    state: State,
    phase: Running,
    planned: Planned,
    purpose: Purpose,
    reason: str,
    at: float,
    *,
    asked: Declined | None,
) -> Outcome:
    """Have the group of `planned` made ready."""
    facts = state.facts
    made = Preparation(
        generation=next_generation(facts),
        number=phase.preparations + 1,
        plan=keep_places(planned.plan, phase.plan, at_hand(facts)),
        moved=planned.moved,
        step_s=planned.step_s,
        purpose=purpose,
        reason=reason,
        since=at,
        present=_present(facts),
        leaving=_leaving(facts),
        asked=asked,
    )
    prepare = Prepare(
        generation=made.generation,
        beside=facts.lineage.generation,
        number=made.number,
        plan=made.plan,
        step=facts.lineage.step,
        by_module=facts.lineage.by_module,
    )
    return Outcome(
        state=replace(state, phase=replace(phase, preparation=made, preparations=made.number)),
        commands=(prepare,),
        reason=f"made ready while the group trains: {reason}",
        planned=planned.reason,
    )


def prepared(state: State, event: Prepared) -> Outcome:
    """Every member of the next group is ready for the swap."""
    phase = state.phase
    made = of(phase)
    if not isinstance(phase, Running) or made is None or (made.number, made.took) != (event.number, None):
        return Outcome(state=state, reason=f"nobody waits for preparation {event.number}")
    phase = replace(phase, preparation=replace(made, took=event.seconds))
    return Outcome(
        state=replace(state, phase=phase),
        reason=f"generation {made.generation} was made ready in {event.seconds:.2g} s",
    )


def not_prepared(state: State, event: NotPrepared) -> Outcome:
    """The group that trains stays as it is. Who leaves goes without a preparation."""
    phase = state.phase
    made = of(phase)
    if not isinstance(phase, Running) or made is None or made.number != event.number:
        return Outcome(state=state, reason=f"preparation {event.number} is forgotten already")
    declined = phase.declined if made.asked is None else replace(made.asked, at=event.at)
    phase = replace(phase, preparation=None, unprepared=made.present, declined=declined)
    return Outcome(
        state=replace(state, phase=phase),
        reason=f"generation {made.generation} was not made ready: {event.cause.detail}",
    )


def due_at(made: Preparation, policy: Policy) -> float:
    """When nobody waits for a preparation any more. The effect ends before that, by its own deadline."""
    return made.since + policy.timing.user_code_s + 2 * policy.timing.form_s


def holds(made: Preparation, facts: Facts) -> bool:
    """Whether those are there, and those are leaving, for whom it was begun."""
    return (made.present, made.leaving) == (_present(facts), _leaving(facts))


def of(phase: Phase) -> Preparation | None:
    """The preparation that a phase knows of."""
    match phase:
        case Running(preparation=made) | Pausing(prepared=made) | Waiting(prepared=made):
            return made
        case _:
            return None


def without(phase: Phase) -> Phase:
    """The phase without its preparation."""
    match phase:
        case Running():
            return replace(phase, preparation=None)
        case Pausing() | Waiting():
            return replace(phase, prepared=None)
        case _:
            return phase


def forgotten(before: State, outcome: Outcome) -> Outcome:
    """An outcome that leaves nothing behind: a preparation that is neither kept nor taken up is dismissed."""
    made, kept = of(before.phase), of(outcome.state.phase)
    if made is None:
        return outcome
    if kept is not None and (kept.generation, kept.number) == (made.generation, made.number):
        return outcome
    if any(isinstance(command, Form) and command.prepared for command in outcome.commands):
        return outcome
    dismiss = Dismiss(generation=made.generation, number=made.number, workers=made.plan.workers)
    return replace(outcome, commands=(dismiss, *outcome.commands))


def _present(facts: Facts) -> tuple[str, ...]:
    return tuple(worker.name for worker in present(facts.membership))


def _leaving(facts: Facts) -> tuple[str, ...]:
    return tuple(sorted(draining(facts.membership)))
