"""What `fit` returns: the history of a run as those who know Ray Train's read it."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import pytest

from elastic_train.cluster.driver.result import Result
from elastic_train.control.events import Event, GroupReady, StepCommitted
from elastic_train.errors import StorageNotFound
from elastic_train.observe.journal_records import Record, to_json, wall_text
from elastic_train.storage.fsspec_store import open_store
from elastic_train.storage.journal import Journal

pytestmark = [pytest.mark.ring1, pytest.mark.filterwarnings("default")]


def ready(generation: int, step: int) -> Event:
    return GroupReady(at=0.0, generation=generation, step=step, seconds=1.0)


def committed(generation: int, step: int, loss: float, **metrics: float) -> Event:
    return StepCommitted(
        at=0.0,
        generation=generation,
        step=step,
        loss=loss,
        tokens=4.0,
        grad_norm=1.0,
        skipped=False,
        seconds=1.0,
        vote=(),
        metrics=tuple(metrics.items()),
    )


def result(path: Path, *events: Event) -> Result:
    journal = Journal(open_store(str(path)), 1)
    for seq, event in enumerate(events):
        record = Record(seq=seq, wall=wall_text(seq), event=event, reason="", phase="running")
        journal.append(to_json(record))
    journal.flush()
    return Result(metrics={}, checkpoint=None, error=None, path=str(path))


def test_a_data_frame_has_each_step_that_was_kept_once_with_its_metrics(tmp_path: Path) -> None:
    path = tmp_path / "run"
    made = result(
        path,
        ready(1, 0),
        committed(1, 1, 4.0),
        committed(1, 2, 3.0, accuracy=0.25),
        ready(2, 1),  # step 2 is run again
        committed(2, 2, 2.5),
        committed(2, 2, 2.5, accuracy=0.5),
        committed(2, 3, 2.0),
    )
    there = pickle.loads(pickle.dumps(made))
    for each in (made, there):
        frame = each.metrics_dataframe
        assert [*frame.columns] == ["step", "loss", "accuracy"]
        assert frame["step"].tolist() == [1, 2, 3]
        assert frame["loss"].tolist() == [4.0, 2.5, 2.0]
        assert frame["accuracy"].fillna(-1.0).tolist() == [-1.0, 0.5, -1.0]
    shutil.rmtree(path)
    assert len(made.metrics_dataframe) == 3, "it was read"


def test_a_data_frame_is_read_from_storage_by_nobody_but_who_asks_for_it(tmp_path: Path) -> None:
    made = result(tmp_path / "run", ready(1, 0))
    assert [*made.metrics_dataframe.columns] == ["step", "loss"]
    assert made.metrics_dataframe.empty
    gone = Result(metrics={"loss": 1.0}, checkpoint=None, error=None, path=str(tmp_path / "gone"))
    assert "loss" in repr(gone)
    assert gone == Result(metrics={"loss": 1.0}, checkpoint=None, error=None, path=str(tmp_path / "gone"))
    with pytest.raises(StorageNotFound, match="the journal is not there any more"):
        _ = gone.metrics_dataframe
