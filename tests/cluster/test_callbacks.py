"""Ray Train's callbacks: what they are told, and that none of them can end a run."""

from __future__ import annotations

from typing import Any

import pytest
from ray.train import UserCallback

from elastic_train.cluster.driver.callbacks import KEPT, Callbacks
from elastic_train.config import Batch, RunSpec
from elastic_train.control.commands import End
from elastic_train.control.events import Cause, CheckpointCommitted, StepCommitted, Tick
from elastic_train.observe.journal_records import Record, wall_text
from elastic_train.recovery.evidence import Stored

pytestmark = pytest.mark.ring1
SPEC = RunSpec(
    name="run",
    storage_path="/storage",
    batch=Batch(global_size=4, micro_size=2),
    max_steps=9,
    min_workers=1,
    max_workers=2,
)


class Listens(UserCallback):
    def __init__(self) -> None:
        self.reports: list[tuple[dict[str, Any], str | None]] = []
        self.errors: dict[int, Exception] = {}
        self.run = ""

    def after_report(self, run_context: Any, metrics: Any, checkpoint: Any) -> None:
        self.run = run_context.run_config.name
        self.reports += [(metrics[0], checkpoint and checkpoint.path)]

    def after_exception(self, run_context: Any, worker_exceptions: Any) -> None:
        self.errors |= worker_exceptions


class Raises(UserCallback):
    def after_report(self, run_context: Any, metrics: Any, checkpoint: Any) -> None:
        raise ValueError("a bug of the callback's own")

    def after_exception(self, run_context: Any, worker_exceptions: Any) -> None:
        raise ValueError("another one")


def record(event: Any) -> Record:
    return Record(seq=0, wall=wall_text(0.0), event=event, reason="", phase="running")


def step(number: int, loss: float = 0.5, **metrics: float) -> Record:
    event = StepCommitted(
        at=0.0,
        generation=1,
        step=number,
        loss=loss,
        tokens=1.0,
        grad_norm=1.0,
        skipped=False,
        seconds=1.0,
        vote=(),
        metrics=tuple(metrics.items()) or (("accuracy", 0.25),),
    )
    return record(event)


def saved(number: int) -> Record:
    stored = Stored(slot=1, step=number, generation=1, term=1, path=f"checkpoints/{number}")
    return record(CheckpointCommitted(at=0.0, stored=stored))


def test_a_callback_hears_of_each_step_and_of_each_checkpoint_with_the_metrics_of_its_step() -> None:
    listens = Listens()
    reported = Callbacks([listens], SPEC)
    reported.hear([step(1), record(Tick(at=0.0)), step(2)])
    reported.hear([step(3), saved(2)])
    metrics = [{"step": n, "loss": 0.5, "accuracy": 0.25} for n in (1, 2, 3)]
    assert listens.reports[:3] == [(said, None) for said in metrics]
    assert listens.reports[3:] == [(metrics[1], "/storage/run/checkpoints/2")]
    assert listens.run == "run"
    reported.hear([step(4, step=3.0)])
    assert listens.reports[-1][0]["step"] == 4, "whatever a loop reports by that name"


def test_a_checkpoint_comes_with_what_was_said_last_of_its_step() -> None:
    listens = Listens()
    reported = Callbacks([listens], SPEC)
    reported.hear(
        [step(1), step(2), step(2, perplexity=9.0), step(3), step(2, loss=0.75, accuracy=0.5), saved(2)]
    )
    assert [metrics["step"] for metrics, _ in listens.reports] == [1, 2, 2, 3, 2, 2]
    assert listens.reports[4][0] == {"step": 2, "loss": 0.75, "accuracy": 0.5}
    assert listens.reports[5][0] == {"step": 2, "loss": 0.75, "accuracy": 0.5, "perplexity": 9.0}
    reported.hear([step(number) for number in range(4, 4 + KEPT)])
    reported.hear([saved(4), saved(3)])
    assert listens.reports[-2][0]["accuracy"] == 0.25
    assert listens.reports[-1][0] == {"step": 3}, "the metrics of many steps ago are forgotten"


def test_an_error_of_the_jobs_own_code_is_told_with_its_rank_and_no_other_end_is() -> None:
    listens = Listens()
    reported = Callbacks([listens], SPEC)
    reported.ended(End(outcome="infrastructure", detail="too many losses"), None)
    assert listens.errors == {}
    cause = Cause(kind="user", detail="ValueError: no", rank=3)
    reported.ended(End(outcome="user_error", detail="ValueError: no", cause=cause), None)
    assert list(listens.errors) == [3]
    assert "ValueError: no" in str(listens.errors[3])


def test_a_callback_that_raises_is_counted_and_the_others_hear_all() -> None:
    listens = Listens()
    reported = Callbacks([Raises(), listens], SPEC)
    reported.hear([step(1), step(2)])
    reported.ended(End(outcome="user_error", detail="no"), None)
    assert reported.failures == 3
    assert len(listens.reports) == 2
    assert list(listens.errors) == [0]
