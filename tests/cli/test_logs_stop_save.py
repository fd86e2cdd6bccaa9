"""`logs` and `stop`: from storage alone, with the run's own exit code."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from elastic_train.cli import logs_stop_save
from elastic_train.cli.exit_codes import OUTCOMES, code_of
from elastic_train.control.commands import RunOutcome
from elastic_train.control.events import StopRequested
from elastic_train.errors import (
    CapacityTimeout,
    ConfigError,
    InfrastructureError,
    LeaseHeld,
    NoCheckpoint,
    StorageNotFound,
    UserCodeError,
)
from elastic_train.observe.journal_records import Record, to_json, wall_text
from elastic_train.storage.commit_log import CommitLog
from elastic_train.storage.fsspec_store import open_store
from elastic_train.storage.job_output import OutputLine, OutputWriter
from elastic_train.storage.journal import Journal
from elastic_train.storage.lease import PATH, Lease
from elastic_train.storage.run_requests import stop_asked
from tests.cli.conftest import renewing

pytestmark = pytest.mark.ring1


def note(journal: Journal, reason: str, *, ended: tuple[str, str] | None = None) -> None:
    record = Record(
        seq=0,
        wall=wall_text(0.0),
        event=StopRequested(at=0.0, reason="asked"),
        reason=reason,
        phase="ended" if ended else "running",
        commands=("Pause",),
        ended=ended,
    )
    journal.append(to_json(record))
    journal.flush()


@pytest.mark.parametrize(
    ("outcome", "code"), [("finished", 0), ("user_error", 1), ("infrastructure", 3), ("stopped", 5)]
)
def test_following_a_run_ends_with_its_end_and_its_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], outcome: str, code: int
) -> None:
    journal = Journal(open_store(str(tmp_path)), 1)
    note(journal, "growing")
    threading.Timer(0.1, note, (journal, "over"), {"ended": (outcome, "over")}).start()
    assert logs_stop_save.show_logs(str(tmp_path), follow=True, verbose=True) == code
    printed = capsys.readouterr().out
    assert "asked to stop: asked" in printed
    assert "growing" in printed
    assert "over" in printed


def test_without_follow_it_prints_what_there_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    note(Journal(open_store(str(tmp_path)), 1), "growing")
    assert logs_stop_save.show_logs(str(tmp_path), follow=False) == 0
    printed = capsys.readouterr().out
    assert "asked to stop: asked" in printed
    assert "growing" not in printed, "the reason is said where it is asked for"


def test_a_place_without_a_run_is_told(tmp_path: Path) -> None:
    with pytest.raises(StorageNotFound, match="no run"):
        logs_stop_save.show_logs(str(tmp_path), follow=True)
    with pytest.raises(StorageNotFound, match="no run"):
        logs_stop_save.stop_run(str(tmp_path), wait=False)


def test_a_request_to_stop_is_for_the_term_that_runs_and_for_no_other(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    lease = Lease(store, holder="a controller", lease_s=0.1)
    lease.acquire()
    lease.renew(4)
    for _ in range(2):
        assert logs_stop_save.stop_run(str(tmp_path), wait=False) == 0
    assert stop_asked(store, 4) == "`elastic-train stop`"
    assert stop_asked(store, 5) is None
    lease.release()
    with pytest.raises(ConfigError, match="not running"):
        logs_stop_save.stop_run(str(tmp_path), wait=False)


def test_a_late_word_of_an_old_holder_does_not_lead_a_request_astray(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    log = CommitLog(store)
    for holder in ("a", "b"):
        lease = Lease(store, holder=holder, lease_s=0.1)
        lease.acquire()
        lease.renew(log.begin_term(holder))
        if holder == "a":
            late = store.read(PATH)
    store.write(PATH, late)
    assert logs_stop_save.stop_run(str(tmp_path), wait=False) == 0
    assert stop_asked(store, 2) == "`elastic-train stop`"
    assert stop_asked(store, 1) is None


def test_somebody_who_renews_the_lease_is_alive_and_nobody_else(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    lease = Lease(store, holder="a controller", lease_s=0.1)
    lease.acquire()
    assert not logs_stop_save.alive(store, 0.5)
    with renewing(lease):
        assert logs_stop_save.alive(store, 100.0)


def test_every_outcome_and_every_error_has_its_exit_code() -> None:
    assert set(OUTCOMES) == set(RunOutcome.__args__)
    where = {"rank": 0, "node": "n", "step": 1, "phase": "loss", "error": "e", "traceback": ""}
    errors = {
        1: UserCodeError(worker="w", **where),
        2: ConfigError(field="f", problem="p"),
        3: InfrastructureError(cause="c"),
        4: CapacityTimeout(needed=2, present=1, waited_s=1.0),
        6: NoCheckpoint(url="u", problem="p"),
    }
    assert {code: code_of(error) for code, error in errors.items()} == {code: code for code in errors}
    assert code_of(LeaseHeld(run="r", holder="h", age_s=0.0)) == 2
    assert sorted(OUTCOMES.values()) == [0, 1, 3, 3, 4, 5, 6], "3 is also for a run that another one fenced"


def printed(at: float, rank: int, text: str) -> OutputLine:
    return OutputLine(at=wall_text(at), worker=f"w{rank}", rank=rank, stream="out", text=text)


def test_logs_have_what_the_job_printed_by_time_and_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = open_store(str(tmp_path))
    note(Journal(store, 1), "growing", ended=("finished", "over"))
    for rank in (0, 1):
        writer = OutputWriter(store, f"w{rank}.1")
        writer.add([printed(-5.0, rank, "early \x1b[31m"), printed(5.0, rank, "late")])
        writer.flush()
    logs_stop_save.show_logs(str(tmp_path), follow=False)
    said = capsys.readouterr().out
    assert "\x1b" not in said
    order = [said.index(text) for text in (r"rank 0 | early \x1b[31m", "finished at step", "rank 1 | late")]
    assert order == sorted(order)
    logs_stop_save.show_logs(str(tmp_path), follow=False, rank=1)
    assert "rank 0 |" not in capsys.readouterr().out
    logs_stop_save.show_logs(str(tmp_path), follow=False, output=False)
    assert "rank" not in capsys.readouterr().out
