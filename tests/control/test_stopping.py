from __future__ import annotations

import pytest

from elastic_train.control.commands import End, Pause
from elastic_train.control.events import (
    Cause,
    FencedOff,
    GroupBroken,
    SaveFailed,
    StopRequested,
    Tick,
    WorkerLost,
)
from elastic_train.control.states import Ended, Pausing

pytestmark = pytest.mark.ring0


def ask(play):
    return play(StopRequested, reason="SIGTERM")


def test_a_running_group_stops_at_the_next_step_with_a_checkpoint(play):
    play.running(2, step=3)
    ask(play)
    assert play.commands == (Pause(generation=1, save=True),)
    play.step(4)
    play.settle()
    assert isinstance(play.phase, Pausing)
    play.parts(4)
    play.saved(4)
    assert play.ordered(End)[0].outcome == "stopped"
    assert "the checkpoint of step 4 is kept" in play.ordered(End)[0].detail


def test_a_checkpoint_that_cannot_be_written_does_not_hold_up_the_stop(play):
    play.running(2, step=3)
    ask(play)
    play(SaveFailed, generation=1, step=3, problem="503")
    play.settle()
    assert play.phase.outcome == "stopped"
    assert "nothing was saved" in play.phase.detail


def test_a_stop_ends_at_its_deadline(play):
    play.running(2, step=3)
    ask(play)
    play.wait(14.0)
    assert play.phase.outcome == "stopped"


def test_the_second_request_stops_at_once(play):
    play.running(2, step=3)
    ask(play)
    ask(play)
    assert play.phase.outcome == "stopped"


@pytest.mark.parametrize("phase", ["waiting", "forming", "settling"])
def test_where_nothing_trains_a_stop_is_immediate(play, phase):
    match phase:
        case "waiting":
            play.begin(3)
        case "forming":
            play.begin(3).ready()
        case _:
            play.running(3, step=2)
            play.lose("w0001")
    ask(play)
    assert play.phase.outcome == "stopped"


def test_a_stop_takes_over_a_pause(play):
    play.running(2, step=3)
    play.nodes("abc")
    play.ready()
    play.wait(4.0)
    play.settle("w0001")
    ask(play)
    assert play.commands == (Pause(generation=1, save=True),)
    play.settle("w0002")
    play.parts(3)
    play.saved(3)
    assert play.phase.outcome == "stopped"


def test_a_loss_while_stopping_ends_the_run_with_what_is_stored(play):
    play.running(2, step=3)
    ask(play)
    play.lose("w0001")
    assert play.phase.outcome == "stopped"


def test_a_whole_checkpoint_is_still_committed_after_a_loss_while_stopping(play):
    play.running(2, step=3)
    ask(play)
    play.parts(3)
    play.lose("w0001")
    assert isinstance(play.phase, Pausing)
    play.saved(3)
    assert play.phase.outcome == "stopped"
    assert "step 3 is kept" in play.phase.detail


def test_a_user_error_while_stopping_is_a_user_error(play):
    play.running(2, step=3)
    ask(play)
    play.broken("w0001", "user", "ValueError")
    assert play.phase.outcome == "user_error"


def test_a_stop_after_the_last_step_waits_for_its_checkpoint(play):
    play.running(2, step=20)
    ask(play)
    assert play.commands == ()
    play.parts(20)
    play.saved(20)
    assert play.phase.outcome == "finished"


def test_a_fenced_controller_ends_itself(play):
    play.running(2, step=3)
    play(FencedOff, by_term=2)
    assert play.ordered(End)[0].outcome == "fenced"


def test_the_end_is_final(play):
    play.running(2, step=3)
    ask(play)
    ask(play)
    ended = play.state
    play(Tick)
    play(WorkerLost, worker="w0001", cause=Cause(kind="death", detail=""))
    play(GroupBroken, generation=1, worker="w0001", cause=Cause(kind="user", detail=""))
    play.saved(20)
    ask(play)
    assert play.state is ended
    assert isinstance(play.phase, Ended)
    assert play.outcome.reason == "the run is over: stopped"
