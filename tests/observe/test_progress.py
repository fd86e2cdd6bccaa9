from __future__ import annotations

from dataclasses import replace

import pytest

from elastic_train.control.events import CheckpointCommitted, TermBegan
from elastic_train.control.fault_schedule import KillRank, Moment
from elastic_train.observe.journal_records import Record, wall_text
from elastic_train.observe.run_progress import RunProgress, advance
from elastic_train.observe.status_numbers import live_line
from elastic_train.recovery.evidence import Stored

pytestmark = pytest.mark.ring0


def followed(records) -> list[RunProgress]:
    seen = [RunProgress()]
    for record in records:
        seen.append(advance(seen[-1], record))
    return seen


def test_the_line_says_where_a_run_stands():
    progress = RunProgress(
        step=41,
        loss=2.9312,
        speeds=((12300.0, 1.0),),
        dp=3,
        nodes=3,
        saved=40,
        groups=2,
        phase="running",
    )
    assert (
        live_line(progress, 200)
        == "step 41/200  loss 2.93  12.3k tok/s  dp 3 on 3 nodes  saved 40  restarts 1"
    )


@pytest.mark.parametrize(
    ("speed", "text"), [(0.5, "0.5"), (999.0, "999"), (1234.0, "1.23k"), (5.6e7, "56M"), (3.2e13, "32000G")]
)
def test_speeds_are_short(speed, text):
    progress = RunProgress(step=1, speeds=((speed, 1.0),), phase="running")
    assert live_line(progress, 2) == f"step 1/2  {text} tok/s  restarts 0"


def test_before_the_first_group_the_line_says_what_is_waited_for():
    assert live_line(RunProgress(), 10) == "step 0/10  restarts 0  waiting"


def test_a_skipped_step_is_named():
    assert "(skipped)" in live_line(RunProgress(step=1, loss=float("nan"), skipped=True, phase="running"), 10)


def test_the_progress_of_a_run_is_the_fold_of_its_records(recorded):
    seen = followed(recorded(KillRank(when=Moment(step=8), rank=1), max_steps=30))
    last = seen[-1]
    assert (last.step, last.saved, last.phase) == (30, 30, "ended")
    assert last.ended is not None
    assert last.ended[0] == "finished"
    assert last.restarts == 2  # the loss and the return to four workers
    assert (last.dp, last.nodes) == (4, 4)
    assert last.tokens_per_s == 500.0


def test_after_a_return_to_a_checkpoint_the_step_goes_back(recorded):
    steps = [p.step for p in followed(recorded(KillRank(when=Moment(step=8), rank=1)))]
    assert steps.index(7) < len(steps) - steps[::-1].index(5)


def test_a_resumed_run_shows_what_is_stored_and_an_older_commit_does_not_move_it_back():
    stored = Stored(slot=4, step=12, generation=1, term=1, path="")
    began = Record(
        seq=0,
        wall=wall_text(0.0),
        event=TermBegan(at=0.0, term=2, stored=stored, ever_stored=True),
        reason="",
        phase="waiting",
    )
    progress = advance(RunProgress(), began)
    assert (progress.step, progress.saved) == (12, 12)
    late = replace(began, event=CheckpointCommitted(at=1.0, stored=replace(stored, step=9)))
    assert advance(progress, late).saved == 12
