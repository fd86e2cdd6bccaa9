"""A step that is told again: with metrics, or as the one with which the job's own loop ended the run."""

from __future__ import annotations

import pytest

from elastic_train.control.commands import Commit, End
from elastic_train.control.events import TermBegan
from elastic_train.control.states import Running

pytestmark = pytest.mark.ring0


def test_metrics_that_come_after_their_step_are_those_of_its_checkpoint(play):
    play.running(2, step=4)
    play.step(5, loss=0.5)
    play.step(6)
    assert "has metrics" in play.step(5, loss=0.5, metrics=(("accuracy", 0.9),)).reason
    play.step(5, loss=0.5, metrics=(("fooled", 0.1),))
    play.parts(5)
    assert play.ordered(Commit)[0].metrics == (("loss", 0.5), ("accuracy", 0.9), ("fooled", 0.1))


def test_a_loop_that_ends_the_run_early_is_finished_with_the_checkpoint_of_its_last_step(play):
    play.running(2, step=4)
    play.step(5)
    assert "ended the run at step 5" in play.step(5, last=True).reason
    play.settle()
    assert isinstance(play.phase, Running)
    play.parts(5)
    play.saved(5)
    assert [(c.outcome, c.detail) for c in play.ordered(End)] == [
        ("finished", "all 5 steps are committed and saved")
    ]


def test_a_loop_that_trains_on_after_a_failure_at_its_end_has_not_ended(play):
    play.running(2, step=4)
    play.step(5)
    play.step(5, last=True)
    assert play.facts.lineage.ended == 5
    play.step(6)
    assert play.facts.lineage.ended is None
    play.saved(5)
    assert isinstance(play.phase, Running)


def test_a_run_that_its_loop_ended_is_complete_where_it_is_submitted_again(play):
    play.running(2, step=4)
    play.step(5)
    play.step(5, last=True)
    play.parts(5)
    play.saved(5)
    play(TermBegan, term=2, stored=play.stored(5), ever_stored=True)
    assert play.ordered(End)[-1].detail == "already complete: step 5 of 5 is committed and saved"
