"""End a run. Terminal states are final."""

from __future__ import annotations

from dataclasses import replace

from elastic_train.control.commands import End, RunOutcome
from elastic_train.control.events import Cause
from elastic_train.control.states import Ended, Outcome, State


def end(
    state: State, outcome: RunOutcome, detail: str, *, cause: Cause | None = None, worker: str = ""
) -> Outcome:
    phase = Ended(outcome=outcome, detail=detail, cause=cause, worker=worker)
    return Outcome(
        state=replace(state, phase=phase),
        commands=(End(outcome=outcome, detail=detail, cause=cause, worker=worker),),
        reason=detail,
    )


def end_by_user_error(state: State, cause: Cause, worker: str) -> Outcome:
    """The job's own code raised: nothing is retried."""
    who = f" on {worker}" if worker else ""
    where = f" in {cause.phase}" if cause.phase else ""
    when = f" of step {cause.step}" if where and cause.step else ""
    return end(
        state,
        "user_error",
        f"the job's own code raised{who}{where}{when}: {cause.detail}",
        cause=cause,
        worker=worker,
    )
