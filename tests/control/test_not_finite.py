from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.control.commands import Commit, End
from elastic_train.control.events import Adopted, TermBegan
from elastic_train.control.not_finite import row_with, too_long
from elastic_train.control.states import Ended, Running

pytestmark = pytest.mark.ring0


def skip(play, number: int):
    return play.step(number, loss=math.nan, grad_norm=math.nan, skipped=True)


def test_a_bounded_number_of_steps_in_a_row_that_are_not_finite_ends_the_run(play):
    play.running(2, step=4)
    play.policy = replace(play.policy, not_finite=3)
    skip(play, 5)
    skip(play, 6)
    assert isinstance(play.phase, Running)
    skip(play, 7)
    assert isinstance(play.phase, Ended)
    (end,) = play.ordered(End)
    assert end.outcome == "user_error"
    assert "3 steps in a row, 5 to 7" in end.detail
    assert "the last finite step is 4" in end.detail


def test_a_finite_step_ends_the_row(play):
    play.running(2, step=1)
    play.policy = replace(play.policy, not_finite=2)
    for number in range(2, 12):
        skip(play, number) if number % 2 else play.step(number)
    assert isinstance(play.phase, Running)


def test_a_failure_in_the_middle_of_a_row_does_not_begin_it_anew(play):
    play.running(2, step=3)
    play.policy = replace(play.policy, not_finite=4)
    skip(play, 4)
    skip(play, 5)
    play.broken("w0001")
    play.settle(step=5)
    play.go()
    skip(play, 6)
    assert isinstance(play.phase, Running)
    skip(play, 7)
    assert isinstance(play.phase, Ended)
    assert "4 to 7" in play.outcome.reason


def test_a_run_that_is_submitted_again_has_all_its_steps(play):
    play.running(2, step=4)
    play.policy = replace(play.policy, not_finite=3)
    for number in (5, 6):
        skip(play, number)
    play.parts(6)
    play.saved(6)
    skip(play, 7)
    assert isinstance(play.phase, Ended)
    play(TermBegan, term=2, stored=play.stored(6), ever_stored=True)
    play(Adopted, running=())
    play.nodes("ab")
    play.ready()
    play.go()
    for number in (7, 8):
        skip(play, number)
    assert isinstance(play.phase, Running)
    skip(play, 9)
    assert "7 to 9" in play.outcome.reason


def test_a_checkpoint_has_no_metric_that_is_no_number(play):
    play.running(2, step=4)
    play.step(5, loss=math.nan, skipped=True, metrics=(("accuracy", 0.9), ("f1", math.inf)))
    play.parts(5)
    assert play.ordered(Commit)[0].metrics == (("accuracy", 0.9),)


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 5))
def test_a_row_is_as_long_as_what_it_counts(skips: list[bool], allowed: int) -> None:
    row, length = None, 0
    for step, skipped in enumerate(skips, start=1):
        row = row_with(row, step, skipped=skipped)
        length = length + 1 if skipped else 0
        assert (row is None) == (length == 0)
        assert row is None or row == (step - length + 1, step)
        assert too_long(row, allowed) == (length >= allowed)


def test_a_commit_has_metrics_that_overtook_the_report_of_their_step(play):
    play.running(2, step=4)
    for rank in range(2):
        play.part(5, rank, metrics=(("accuracy", 0.9), ("loss", 0.5)))
    assert dict(play.ordered(Commit)[0].metrics) == {"accuracy": 0.9, "loss": 0.5}
