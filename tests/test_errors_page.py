"""docs/errors.md has an entry for every error, end and cause, and each entry is whole."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from elastic_train import errors
from elastic_train.cli.exit_codes import OUTCOMES, exits, place_of
from elastic_train.control.commands import RunOutcome
from elastic_train.control.events import CauseKind
from elastic_train.errors import ConfigError, ElasticTrainError

pytestmark = pytest.mark.ring0
PAGE = (Path(__file__).parents[1] / "docs" / "errors.md").read_text()
ENTRIES = dict(re.findall(r'<a id="([a-z-_]+)"></a>\n### \w+\n(.*?)(?=\n<a id=|\Z)', PAGE, re.DOTALL))
KINDS = {
    kind.__name__.lower()
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, ElasticTrainError) and kind is not ElasticTrainError
}


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


def test_the_entry_is_printed_with_the_error(capsys: pytest.CaptureFixture[str]) -> None:
    error = ConfigError(field="x", problem="is odd.")
    with pytest.raises(SystemExit), exits():
        raise error
    assert capsys.readouterr().err == "error: x: is odd.\nsee docs/errors.md#configerror\n"
    assert place_of(error) in ENTRIES
