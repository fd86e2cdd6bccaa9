"""Count steps without a finite loss and gradient (NaN, inf). Too many in a row end the run.

A row is its first and last step. It is cut by a finite step, also by one that a later generation runs again.
"""

from __future__ import annotations

from elastic_train.control.ending import end
from elastic_train.control.events import Cause
from elastic_train.control.states import Outcome, State

NOT_FINITE = "the loss and its gradient"
"""The phase of a cause that is such a row."""

Row = tuple[int, int]


def row_with(row: Row | None, step: int, *, skipped: bool) -> Row | None:
    """The row after one more committed step."""
    if not skipped:
        return None
    if row is not None and row[0] <= step <= row[1] + 1:
        return row[0], step
    return step, step


def too_long(row: Row | None, allowed: int) -> bool:
    return row is not None and row[1] - row[0] + 1 >= allowed


def reported(row: Row) -> str:
    """What happened, for people; the last finite step is in it."""
    first, last = row
    before = f"the last finite step is {first - 1}" if first > 1 else "no step before them was finite"
    return (
        f"{last - first + 1} steps in a row, {first} to {last}, had no finite loss and gradient and were "
        f"skipped; {before}"
    )


def end_by_row(state: State, row: Row) -> Outcome:
    cause = Cause(kind="user", detail=reported(row), phase=NOT_FINITE, step=row[1])
    return end(state, "user_error", cause.detail, cause=cause)
