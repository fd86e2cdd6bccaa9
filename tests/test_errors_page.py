"""docs/errors.md has an entry for every error, end and cause, and each entry is whole."""

from __future__ import annotations

import pickle
import re
import traceback
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest

from elastic_train import errors
from elastic_train.cli.exit_codes import OUTCOMES, exits
from elastic_train.control.causes import CauseKind
from elastic_train.control.changes import Change
from elastic_train.control.commands import RunOutcome
from elastic_train.control.events import Tick
from elastic_train.errors import ElasticTrainError
from elastic_train.observe.event_text import place_in_page
from elastic_train.observe.journal_records import Record

pytestmark = pytest.mark.ring0
PAGE = (Path(__file__).parents[1] / "docs" / "errors.md").read_text()
ENTRIES = dict(re.findall(r'<a id="([a-z-_]+)"></a>\n### \w+\n(.*?)(?=\n<a id=|\Z)', PAGE, re.DOTALL))
CLASSES = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, ElasticTrainError) and kind is not ElasticTrainError
]
KINDS = {kind.__name__.lower() for kind in CLASSES}


def test_every_error_end_and_cause_has_an_entry_and_nothing_else_has() -> None:
    ends = {f"ended-{outcome}" for outcome in get_args(RunOutcome)}
    causes = {f"cause-{kind}" for kind in get_args(CauseKind)}
    assert set(ENTRIES) == KINDS | ends | causes
    assert set(OUTCOMES) == set(get_args(RunOutcome))


@pytest.mark.parametrize("entry", sorted(ENTRIES))
def test_an_entry_says_what_why_and_what_to_do(entry: str) -> None:
    parts = re.findall(r"^\*\*(.+?)\*\* (\S.+)$", ENTRIES[entry], re.MULTILINE)
    assert [name for name, _ in parts] == ["What happened.", "Why.", "What to do."]


def test_links_within_the_page_lead_somewhere() -> None:
    places = set(re.findall(r'<a id="(.+?)"></a>', PAGE))
    assert set(re.findall(r"\]\(#(.+?)\)", PAGE)) <= places


def made(kind: type[ElasticTrainError]) -> ElasticTrainError:
    return kind(**{f.name: 3 if f.type in ("int", "float") else "x" for f in fields(kind)})


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_an_error_is_printed_with_its_entry_on_the_command_line_and_in_a_traceback(
    kind: type[ElasticTrainError], capsys: pytest.CaptureFixture[str]
) -> None:
    error = made(kind)
    assert error.entry in ENTRIES
    with pytest.raises(SystemExit) as left, exits():
        raise error
    assert left.value.code in range(1, 7)
    assert capsys.readouterr().err == f"error: {error}\nsee docs/errors.md#{error.entry}\n"
    travelled = pickle.loads(pickle.dumps(error))
    for one in (error, travelled):
        assert "".join(traceback.format_exception(one)).endswith(f"\nsee docs/errors.md#{error.entry}\n")


@pytest.mark.parametrize("cause", get_args(CauseKind))
def test_a_cause_is_told_with_its_entry(cause: CauseKind) -> None:
    change = Change(kind="worker_lost", cause=cause, workers=("w0001",), nodes=("a",))
    told = Record(seq=0, wall="", event=Tick(at=0.0), reason="why", phase="running", change=change)
    assert told.entry in ENTRIES
    assert place_in_page(told.entry) == f" (docs/errors.md#cause-{cause})"


@pytest.mark.parametrize("outcome", get_args(RunOutcome))
def test_an_end_is_told_with_its_entry(outcome: RunOutcome) -> None:
    told = Record(seq=0, wall="", event=Tick(at=0.0), reason="why", phase="ended", ended=(outcome, "detail"))
    assert told.entry == ("" if outcome == "finished" else f"ended-{outcome}")
    assert not told.entry or told.entry in ENTRIES
