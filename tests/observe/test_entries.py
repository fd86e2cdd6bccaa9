"""Where docs/errors.md says what to do about it is told with each cause and each end."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from elastic_train.control.causes import CauseKind
from elastic_train.control.changes import Change
from elastic_train.control.commands import RunOutcome
from elastic_train.control.events import StopRequested
from elastic_train.observe.event_text import place_in_page
from elastic_train.observe.journal_records import FormedGroup, Record

pytestmark = pytest.mark.ring0
PAGE = (Path(__file__).parents[2] / "docs" / "errors.md").read_text()


def told(*, change: Change | None = None, ended: tuple[str, str] | None = None) -> Record:
    event = StopRequested(at=0.0, reason="")
    return Record(
        seq=1, wall="2026-01-01T00:00:00+00:00", event=event, reason="", phase="x", change=change, ended=ended
    )


def test_every_cause_and_every_end_leads_to_an_entry() -> None:
    causes = {told(change=Change(kind="worker_lost", cause=kind)).entry for kind in get_args(CauseKind)}
    ends = {told(ended=(outcome, "")).entry for outcome in get_args(RunOutcome) if outcome != "finished"}
    assert all(f'<a id="{entry}"></a>' in PAGE for entry in causes | ends)
    assert len(causes | ends) == len(get_args(CauseKind)) + len(get_args(RunOutcome)) - 1


def test_what_went_well_leads_nowhere() -> None:
    assert told(ended=("finished", "")).entry == told(change=Change(kind="growth")).entry == ""
    assert place_in_page("") == ""
    assert place_in_page("cause-death") == " (docs/errors.md#cause-death)"


@pytest.mark.parametrize(("nodes", "said"), [(("a", "a"), "dp 2 on 1 node"), (("a", "b"), "dp 2 on 2 nodes")])
def test_nodes_are_counted(nodes: tuple[str, ...], said: str) -> None:
    group = FormedGroup(
        generation=1, step=0, source="fresh", mesh="dp 2", dp=2, workers=("w0", "w1"), nodes=nodes
    )
    assert group.plan == said
