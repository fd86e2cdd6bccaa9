"""What a worker says of how a generation ended."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_train.cluster.worker.compute_time import Stopwatch
from elastic_train.cluster.worker.worker_reporter import WorkerReporter
from elastic_train.config import Batch, RunSpec
from elastic_train.control.events import FinalReport, GroupBroken
from elastic_train.errors import GroupBroken as GroupIsBroken
from elastic_train.recovery.evidence import Vote
from elastic_train.train.member import Member
from elastic_train.train.step.training_loop import StepReport
from elastic_train.train.step.vote import StepStatistics
from tests.tasks.tiny import TinyTask

pytestmark = pytest.mark.ring2


def test_a_break_and_what_is_held_then_are_said_together_and_once() -> None:
    spec = RunSpec(
        name="tiny",
        storage_path="/nowhere",
        batch=Batch(global_size=4, micro_size=1),
        max_steps=4,
        min_workers=1,
        max_workers=1,
    )
    said: list[tuple[Any, ...]] = []
    reporter = WorkerReporter(worker="w0001", node="a", stopwatch=Stopwatch())
    reporter.post = lambda *events, can_wait=False: said.append(events)
    reporter.member = Member(TinyTask(), spec, on_step=lambda _: None)
    reporter.broke(3, GroupIsBroken(generation=3, reason="a peer is gone"))
    ((broken, settled),) = said
    assert isinstance(broken, GroupBroken)
    assert isinstance(settled, FinalReport)
    assert settled.error == broken.cause
    reporter.final_report(3)
    assert len(said) == 1
    reporter.final_report(3, again=True)
    assert said[1:] == [(settled,)]


def test_only_the_first_step_of_a_generation_is_said_at_once() -> None:
    reporter = WorkerReporter(worker="w0001", node="a", stopwatch=Stopwatch())
    said: list[tuple[int, bool]] = []
    reporter.post = lambda event, can_wait=False: said.append((event.step, can_wait))
    for generation, step in ((1, 1), (1, 2), (2, 3), (2, 4)):
        reporter.step(
            StepReport(
                generation=generation,
                rank=0,
                step=step,
                loss=1.0,
                tokens=4.0,
                grad_norm=1.0,
                skipped=False,
                seconds=0.1,
                rates=(),
                ids_digest=0,
                vote=Vote(step=step, values=StepStatistics().values),
            )
        )
    assert said == [(1, False), (2, True), (3, False), (4, True)]
