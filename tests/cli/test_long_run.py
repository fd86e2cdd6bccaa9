"""What is told of a run whose old parts are compacted: the same as if none was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from elastic_train.cli.exit_codes import OUTCOMES
from elastic_train.cli.logs_stop_save import show_logs
from elastic_train.cli.status import show_events, show_status
from elastic_train.cluster.driver.result import Result
from elastic_train.cluster.run_reading import covered, summary
from elastic_train.errors import StorageNotFound
from elastic_train.observe.journal_records import from_json, to_json
from elastic_train.observe.ledger import ledger
from elastic_train.storage.compacted_journal import spans
from elastic_train.storage.fsspec_store import open_store
from elastic_train.storage.journal import Journal, read_journal
from tests.cluster.test_chronicle import lived

pytestmark = pytest.mark.ring1


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A run with kept states, and one with the same records and none."""
    long, plain = (str(tmp_path_factory.mktemp(name)) for name in ("long", "plain"))
    lived(open_store(long), 3)
    journal = Journal(open_store(plain), 1)
    for _, records in read_journal(open_store(long)):
        for record in records:
            journal.append(record)
    journal.flush()
    return long, plain


def said_of(run: str, capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    show_status(run, as_json=True, watch_s=0.0)
    return json.loads(capsys.readouterr().out) | {"run": ""}


def test_status_and_events_are_the_same(runs: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    long, plain = runs
    assert spans(open_store(long))
    assert not spans(open_store(plain))
    assert said_of(long, capsys) == said_of(plain, capsys)
    told = []
    for run in runs:
        show_status(run, as_json=False, watch_s=0.0)
        show_events(run, as_json=False)
        told.append(capsys.readouterr().out)
    assert told[0] == told[1]


def test_logs_begin_at_the_newest_state_and_say_where_the_rest_is(
    runs: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    ended = summary(open_store(runs[0])).progress.ended
    assert ended is not None
    ends = []
    for run in runs:
        assert show_logs(run, follow=False) == OUTCOMES[ended[0]]
        ends.append(capsys.readouterr().out.splitlines())
    assert ends[0][0] == f"(what happened before: elastic-train events {runs[0]})"
    assert len(ends[0]) < len(ends[1])
    assert ends[0][-1] == ends[1][-1]


def test_a_result_reads_all_of_a_long_run_when_it_is_asked_for(runs: tuple[str, str]) -> None:
    long, plain = (Result(metrics={}, checkpoint=None, error=None, path=run) for run in runs)
    assert covered(open_store(runs[0]))[1]
    assert list(map(to_json, long.records)) == list(map(to_json, plain.records))
    assert long.ledger == ledger(plain.records)
    assert from_json(to_json(long.records[0])) == long.records[0]


def test_a_result_whose_storage_is_gone_says_so_and_not_that_nothing_was(tmp_path: Path) -> None:
    gone = Result(metrics={}, checkpoint=None, error=None, path=str(tmp_path / "gone"))
    with pytest.raises(StorageNotFound, match="not there any more"):
        _ = gone.ledger
