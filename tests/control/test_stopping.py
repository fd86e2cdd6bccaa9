from __future__ import annotations

import pytest

from elastic_train.control.commands import End, Pause, Save, StartWorker
from elastic_train.control.events import (
    Adopted,
    Cause,
    FencedOff,
    GroupBroken,
    PartWritten,
    SaveFailed,
    StopRequested,
    TermBegan,
    Tick,
    WorkerLost,
)
from elastic_train.control.states import Ended, Forming, Pausing, Running, Settling

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


def fail(play, step: int = 3):
    return play(SaveFailed, generation=play.facts.lineage.generation, step=step, problem="503")


def test_a_checkpoint_that_cannot_be_written_is_tried_again(play):
    play.running(2, step=3)
    ask(play)
    play.settle()
    fail(play)
    fail(play)
    assert play.wait(4.0).commands == ()
    play.wait(2.0)
    assert play.commands == (Save(generation=1),)
    play.parts(3)
    play.saved(3)
    assert "the checkpoint of step 3 is kept" in play.ordered(End)[0].detail


def test_a_stop_gives_its_checkpoint_up_after_the_time_that_trouble_of_storage_is_borne(play):
    play.running(2, step=3)
    ask(play)
    play.settle()
    fail(play)
    began = play.at
    while not isinstance(play.phase, Ended):
        play.wait(2.0)
        if play.ordered(Save):
            fail(play)
    assert 120.0 < play.at - began < 185.0
    assert "storage failed for 13" in play.phase.detail
    assert "nothing was saved" in play.phase.detail


def test_a_stop_ends_where_nothing_is_heard_of_its_group(play):
    play.running(2, step=3)
    ask(play)
    play.wait(59.0)
    play.step(4)
    play.settle("w0001")
    play.wait(59.0)
    assert isinstance(play.phase, Pausing)
    play.wait(2.0)
    assert play.phase.outcome == "stopped"
    assert "nothing was heard for 61 s" in play.phase.detail


@pytest.mark.parametrize("save_s", [10.0, 100.0, 3000.0])
def test_a_stop_waits_for_its_checkpoint_by_what_the_last_one_took(play, save_s):
    """Measured once, and twice as slow now."""
    play.running(2, step=2)
    play(PartWritten, generation=1, step=2, rank=0, seconds=save_s, bytes=1, manifest="m", digest="d")
    play(PartWritten, generation=1, step=2, rank=1, seconds=save_s, bytes=1, manifest="m", digest="d")
    play.saved(2)
    play.step(3)
    ask(play)
    play.settle()
    end = play.at + 2.0 * save_s
    while play.at < end:
        play.wait(2.0)
    assert isinstance(play.phase, Pausing)
    play.parts(3)
    play.saved(3, slot=2)
    assert "the checkpoint of step 3 is kept" in play.phase.detail


def test_a_stop_waits_while_bytes_of_its_checkpoint_are_written(play):
    """Nothing was measured yet."""
    play.running(2, step=3)
    ask(play)
    play.settle()
    for _ in range(500):
        play.wait(2.0, moved_s=50.0)
    play.parts(3)
    play.saved(3)
    assert "the checkpoint of step 3 is kept" in play.phase.detail


def test_the_second_request_stops_at_once(play):
    play.running(2, step=3)
    ask(play)
    ask(play)
    assert play.phase.outcome == "stopped"


@pytest.mark.parametrize("phase", ["waiting", "forming", "settling"])
def test_where_nothing_is_held_that_is_not_saved_a_stop_is_immediate(play, phase):
    match phase:
        case "waiting":
            play.begin(3)
        case "forming":
            play.begin(3).ready()
        case _:
            play.running(3, step=2)
            play.parts(2)
            play.saved(2)
            play.lose("w0001")
    ask(play)
    assert play.phase.outcome == "stopped"


@pytest.mark.parametrize("phase", ["settling", "forming", "pausing", "stopping"])
def test_what_survivors_hold_is_saved_before_a_run_stops(replicated, phase):
    play = replicated.running(4, step=7)
    match phase:
        case "settling":
            play.lose("w0004")
            ask(play)
            play.settle()
        case "forming":
            play.lose("w0004")
            play.settle()
            ask(play)
        case "pausing":
            play.nodes("abcd", leaving="d")
            assert isinstance(play.phase, Pausing)
            play.lose("w0003")
            ask(play)
            play.settle()
        case _:
            ask(play)
            play.lose("w0004")
            play.settle()
    assert isinstance(play.phase, Forming)
    play.go()
    assert play.ordered(Pause) == [Pause(generation=2, save=True)]
    assert not play.ordered(StartWorker)
    play.step(8)
    play.settle()
    play.parts(8)
    play.saved(8)
    assert play.phase.outcome == "stopped"
    assert "step 8 is kept" in play.phase.detail


def test_a_stop_that_can_recover_nothing_newer_ends_with_what_is_stored(play):
    play.running(3, step=5)
    play.parts(5)
    play.saved(5)
    play.step(6)
    ask(play)
    play.lose("w0001")
    play.settle()
    assert play.phase.outcome == "stopped"
    assert "nobody holds the part of rank 0" in play.phase.detail
    assert "1 committed step is run again" in play.phase.detail
    assert "the checkpoint of step 5 is kept" in play.phase.detail


def test_a_request_to_stop_outlives_the_controller_that_heard_it(replicated):
    play = replicated.running(4, step=7)
    play.lose("w0004")
    ask(play)
    play(TermBegan, term=2, stored=None, ever_stored=False, again=True)
    play(
        Adopted, running=tuple((w, n, 1, 7) for w, n in zip(("w0001", "w0002", "w0003"), "abc", strict=True))
    )
    play.settle()
    play.go()
    assert play.ordered(Pause) == [Pause(generation=1001, save=True)]


def test_a_run_that_is_submitted_again_does_not_stop_by_an_older_request(replicated):
    play = replicated.running(4, step=7)
    play.lose("w0004")
    ask(play)
    play(TermBegan, term=2, stored=None, ever_stored=False)
    play(Adopted, running=())
    play.nodes("ab")
    play.ready()
    assert isinstance(play.phase, Forming)
    play.go()
    assert isinstance(play.phase, Running)


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


def test_a_whole_checkpoint_is_still_committed_after_a_loss_while_stopping(play):
    play.running(2, step=3)
    ask(play)
    play.parts(3)
    play.lose("w0001")
    assert isinstance(play.phase, Pausing)
    play.saved(3)
    assert play.phase.outcome == "stopped"
    assert "step 3 is kept" in play.phase.detail


def test_a_whole_checkpoint_that_cannot_be_committed_after_a_loss_is_recovered_from_the_survivors(replicated):
    play = replicated.running(4, step=3)
    ask(play)
    play.parts(3)
    play.lose("w0004")
    assert isinstance(play.phase, Pausing)
    fail(play)
    play.wait(2.0)
    assert isinstance(play.phase, Settling)
    play.settle()
    play.go()
    assert play.ordered(Pause) == [Pause(generation=2, save=True)]


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


def test_a_request_that_nobody_is_in_a_hurry_for_never_takes_the_checkpoint_from_another(play):
    """As of a driver that is silent, for a minute and for two."""
    play.running(2, step=3)
    for minutes in (1, 2, 3):
        play(StopRequested, reason=f"the driver has been silent for {minutes} min", patient=True)
    assert isinstance(play.phase, Pausing)
    ask(play)
    assert play.phase.outcome == "stopped"
