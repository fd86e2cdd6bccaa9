"""Why a run is on its plan, as the planner said it last."""

from __future__ import annotations

from collections.abc import Sequence

from elastic_train.control.forming import PLANNED
from elastic_train.control.resize import STAYS
from elastic_train.observe.records import Record


def planning(records: Sequence[Record]) -> str:
    """In the planner's words; empty before the first group. What it declined later is newer."""
    for record in reversed(records):
        for mark in (STAYS, PLANNED):
            if mark in record.reason:
                return record.reason.partition(mark)[2]
    return ""
