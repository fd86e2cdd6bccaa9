"""Failures of ranks that are given their state beside the first step, which the others compute."""

from __future__ import annotations

import pytest

from elastic_train.control.states import Forming, Running

pytestmark = pytest.mark.ring0


@pytest.mark.parametrize("kind", ["engine", "hang"])
def test_a_step_that_the_others_computed_alone_does_not_hide_a_wall(replicated, kind):
    """Who is given its state beside the first step comes to the wall in the next one."""
    play = replicated.running(4, step=5)
    wall = {"kind": kind, "detail": "in loss", "phase": "forward", "rank": 1}
    late_again(play, step=6, **wall)
    play.step(6)
    late_again(play, step=7, **wall)
    assert play.phase.outcome == "infrastructure"
    assert play.phase.detail == "the same fault twice at step 7: in loss"


def test_walls_of_two_ranks_or_with_a_whole_step_between_them_are_two(replicated):
    play = replicated.running(4, step=5)
    late_again(play, step=6, kind="hang", phase="forward", rank=1)
    play.step(6)
    late_again(play, step=7, kind="hang", phase="forward", rank=2)
    play.step(7)
    play.step(8)
    late_again(play, step=9, kind="hang", phase="forward", rank=2)
    assert isinstance(play.phase, Running)


def test_steps_that_the_others_compute_alone_are_no_progress(replicated):
    """A rank that ends wherever it first takes part would make a step of each attempt, for ever."""
    play = replicated.running(4, step=5)
    for step in (6, 7, 8):
        late_again(play)
        play.step(step)
        assert play.facts.failures.count == step - 5
    late_again(play)
    assert play.phase.outcome == "infrastructure"
    assert play.phase.detail.startswith("4 failures without progress between them, 3 are allowed")


def late_again(play, **cause) -> None:
    """The group breaks, and one rank of the next is given its state beside its first step."""
    play.broken("w0002", **cause)
    play.settle()
    if isinstance(play.phase, Forming):
        play.go(late=1)
