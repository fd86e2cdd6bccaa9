from __future__ import annotations

import math

import pytest

from elastic_train.config import Checkpoints
from elastic_train.control.events import CheckpointCommitted
from elastic_train.observe.best_checkpoint import best
from elastic_train.observe.journal_records import Record
from elastic_train.recovery.evidence import Stored

pytestmark = pytest.mark.ring0


def committed(step: int, **metrics: float) -> Record:
    stored = Stored(slot=step, step=step, generation=1, term=1, path="")
    event = CheckpointCommitted(at=0.0, stored=stored, metrics=tuple(metrics.items()))
    return Record(seq=step, wall="2026-01-01T00:00:00+00:00", event=event, reason="", phase="running")


def test_the_best_is_named_with_its_step() -> None:
    records = [committed(3, accuracy=0.5), committed(6, accuracy=0.75), committed(9, accuracy=math.nan)]
    assert best(records, Checkpoints(best="accuracy", best_order="max")) == "best accuracy 0.75 at step 6"
    assert best(records, Checkpoints(best="accuracy")) == "best accuracy 0.5 at step 3"


def test_that_none_has_the_metric_is_said() -> None:
    assert "no checkpoint has the metric 'f1'" in best([committed(3, loss=1.0)], Checkpoints(best="f1"))
    assert best([committed(3, loss=1.0)], Checkpoints()) == ""
    assert best([], Checkpoints(best="f1")) == ""
