from __future__ import annotations

from dataclasses import replace

import pytest

from elastic_train.control.clock import shifted
from elastic_train.control.states import Forming, Running, Settling, State, Waiting
from elastic_train.testing.simulator import simulated_policy

pytestmark = pytest.mark.ring0


def test_a_gap_in_the_controllers_own_ticks_voids_running_deadlines(play):
    play.begin(2).ready()
    play.wait(120.0, late=118.0)
    assert isinstance(play.phase, Forming)
    assert "stood still for 118.0 s" in play.outcome.reason
    play.wait(17.0)
    assert isinstance(play.phase, Forming)
    play.wait(3.0)
    assert isinstance(play.phase, Settling)


def test_a_tick_that_is_a_little_late_moves_nothing(play):
    play.begin(2).ready()
    play.wait(21.0, late=5.0)
    assert isinstance(play.phase, Settling)


def test_a_quiet_tick_changes_nothing(play):
    play.running(3, step=2)
    before = play.state
    assert play.wait(1.0).reason == "nothing to do"
    assert play.state is before


@pytest.mark.parametrize("moment", ["waiting", "paused", "running", "failed", "pausing", "settling", "ended"])
def test_shifting_there_and_back_is_the_same_state(play, moment):
    play.running(2, step=3)
    play.nodes("abc")
    match moment:
        case "waiting":
            play.lose("w0001")
            play.nodes("b")
            play.settle()
        case "paused":
            play.ready()
            play.wait(4.0)
            play.settle()
        case "failed":
            play.state = replace(play.state, phase=replace(play.phase, final_failed=1.0))
        case "pausing":
            play.ready()
            play.wait(4.0)
        case "settling":
            play.lose("w0001")
        case "ended":
            play.broken("w0001", "user")
        case _:
            assert isinstance(play.phase, Running)
    assert shifted(play.state, 16.0) != play.state
    assert shifted(shifted(play.state, 16.0), -16.0).facts.term == 1
    assert shifted(shifted(State(phase=Waiting(since=2.0)), 16.0), -16.0) == State(phase=Waiting(since=2.0))


def test_ticks_come_with_every_heartbeat():
    policy = simulated_policy()
    assert policy.tick_s == policy.timing.heartbeat_s
