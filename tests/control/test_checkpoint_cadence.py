"""When checkpoints are taken: automatic intervals, requests, and what one costs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic_train.config import Checkpoints
from elastic_train.control.commands import Save
from elastic_train.control.events import (
    SaveRequested,
)
from elastic_train.control.states import Running

pytestmark = pytest.mark.ring0


def test_control_asks_for_checkpoints_where_the_cadence_is_automatic(play):
    play.policy = replace(play.policy, max_steps=1000, checkpoints=Checkpoints(every="auto"))
    play.running(2, step=3)
    play.at += 60.0
    play.step(4)
    assert play.commands == (Save(generation=1),)
    play.at += 60.0
    play.step(5)  # nothing was measured yet and nothing was written
    assert play.commands == (Save(generation=1),)
    play.part(5, 0)
    play.at += 50.0
    play.step(6, seconds=3.0)  # two seconds longer than others; another would supersede the attempt
    assert play.commands == ()
    play.part(5, 1)
    play.saved(5)
    play.at += 15.0
    play.step(7)
    assert play.commands == ()
    play.at += 60.0
    play.step(8)
    assert play.commands == (Save(generation=1),)


def test_words_after_the_last_step_are_no_sign_of_a_failure(play):
    play.running(2, step=20)
    play.settle()
    assert isinstance(play.phase, Running)
    assert play.commands == ()


def test_a_checkpoint_that_a_person_asks_for_is_taken_at_the_next_step(play):
    play.running(step=3)
    outcome = play(SaveRequested, reason="`ckpt save`")
    assert play.ordered(Save) == [Save(generation=1)]
    assert "asked for" in outcome.reason


def test_nothing_is_saved_on_request_where_nothing_trains(play):
    play.begin()
    play(SaveRequested, reason="`ckpt save`")
    assert not play.ordered(Save)


def test_what_a_checkpoint_costs_is_by_how_much_its_steps_were_longer(play):
    play.running(step=1)
    for step in range(2, 10):
        play.step(step, seconds=1.0)
    play(SaveRequested, reason="test")
    play.step(10, seconds=1.25)
    play.step(11, seconds=1.5)
    play.parts(10)
    play.saved(10)
    assert play.facts.measured.save_cost_s == pytest.approx(0.75)
    play.step(12, seconds=3.0)
    assert play.facts.measured.save_cost_s == pytest.approx(0.75)
