"""`ckpt save`: a request in storage, and the wait for the commit that it leads to."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, cast

import pytest

from elastic_train.checkpoint.run_directory import RunDirectory
from elastic_train.cli import logs_stop_save
from elastic_train.cli.exit_codes import INFRASTRUCTURE
from elastic_train.errors import ConfigError
from elastic_train.storage.commit_log import CommitRecord
from elastic_train.storage.fsspec_store import open_store
from elastic_train.storage.lease import Lease
from elastic_train.storage.run_requests import ask_to_save, saves_asked
from elastic_train.storage.store import Store

pytestmark = pytest.mark.ring1


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run whose lease somebody holds."""
    directory = RunDirectory(open_store(str(tmp_path)))
    lease = Lease(directory.store, holder="a controller", lease_s=5.0)
    lease.acquire()
    lease.renew(directory.begin_term("a controller"))
    return directory


def answer(run: RunDirectory, asked: threading.Event) -> None:
    """What a controller does about a request: sooner or later a commit."""
    while saves_asked(run.store, 1) == 0:
        asked.wait(0.05)
    record = CommitRecord(
        kind="commit", step=40, generation=1, path="checkpoints/step-0000000040.g1", manifest_hash="0"
    )
    run.log.append(record, 1)


def test_it_returns_when_the_checkpoint_is_committed(
    run: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    controller = threading.Thread(target=answer, args=(run, threading.Event()))
    controller.start()
    assert logs_stop_save.save_run(str(tmp_path), within_s=120.0) == 0
    controller.join()
    assert "the checkpoint of step 40 is committed" in capsys.readouterr().out


def test_a_checkpoint_that_does_not_come_is_told(run: RunDirectory, tmp_path: Path) -> None:
    assert logs_stop_save.save_run(str(tmp_path), within_s=0.1) == INFRASTRUCTURE


def test_every_request_counts_and_only_in_its_term(run: RunDirectory) -> None:
    for _ in range(3):
        ask_to_save(run.store, 1)
    assert saves_asked(run.store, 1) == 3
    assert saves_asked(run.store, 2) == 0


class AnswersLost:
    """A store that creates, and tells nobody: whoever tries again finds it done."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def create(self, path: str, data: bytes) -> None:
        self._store.create(path, data)
        self._store.create(path, data)


def test_a_request_whose_answer_was_lost_is_one_request(run: RunDirectory) -> None:
    ask_to_save(cast("Store", AnswersLost(run.store)), 1)
    assert saves_asked(run.store, 1) == 1


def test_a_run_that_nobody_holds_is_not_asked(tmp_path: Path) -> None:
    lease = Lease(open_store(str(tmp_path)), holder="a controller", lease_s=0.1)
    lease.acquire()
    lease.release()
    with pytest.raises(ConfigError, match="not running"):
        logs_stop_save.save_run(str(tmp_path), within_s=1.0)
