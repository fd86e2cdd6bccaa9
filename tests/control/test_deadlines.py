from __future__ import annotations

from dataclasses import replace

import pytest

from elastic_train.control.deadlines import shifted
from elastic_train.control.states import Forming, Running, Settling
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
def test_a_shift_moves_every_running_time(play, moment):
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
        case "pausing":
            play.ready()
            play.wait(4.0)
        case "settling":
            play.lose("w0001")
        case "ended":
            play.broken("w0001", "user")
        case _:
            assert isinstance(play.phase, Running)
    state = play.state
    if moment == "failed":
        state = replace(state, phase=replace(state.phase, final_failed=1.0))
    later = shifted(state, 16.0)
    assert later.now == state.now + 16.0
    assert [w.since for w in later.facts.membership.workers] == [
        w.since + 16.0 for w in state.facts.membership.workers
    ]
    assert getattr(later.phase, "since", 16.0) == getattr(state.phase, "since", 0.0) + 16.0
    assert type(later.phase) is type(state.phase)


def test_ticks_come_with_every_heartbeat():
    policy = simulated_policy()
    assert policy.tick_s == policy.timing.heartbeat_s
