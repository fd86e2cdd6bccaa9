"""After silent corruption: who is named, what is still believed, and where the run goes on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic_train.control.commands import Form
from elastic_train.control.events import Cause, FinalReport, PeersReported
from elastic_train.control.states import Ended
from elastic_train.recovery.evidence import Fresh, FromStorage, Live, PeerSnapshot

pytestmark = pytest.mark.ring0

DETAIL = "silent corruption at step 6"


def differ(play, torn: tuple[str, ...], agreed: int) -> None:
    """Every rank ends; those that are torn hold nothing any more."""
    cause = Cause(kind="corruption", detail=DETAIL, step=6, trusted=agreed)
    generation, workers, step = (
        play.facts.lineage.generation,
        play.plan.workers,
        play.facts.lineage.step,
    )
    play.broken(workers[0], kind="corruption", detail=DETAIL, step=6, trusted=agreed)
    for worker in workers:
        held = () if worker in torn else (play.local_state(worker, step),)
        play(FinalReport, generation=generation, worker=worker, local_states=held, error=cause)


def test_an_outvoted_replica_is_rebuilt_from_the_others_and_no_step_is_lost(replicated) -> None:
    play = replicated.running(4, step=6)
    play.saved(3)
    differ(play, torn=(play.plan.workers[1],), agreed=4)
    (form,) = play.ordered(Form)
    assert isinstance(form.origin, Live)
    assert form.origin.step == 6
    assert "w0002" in form.plan.workers
    assert "w0002" not in form.holders
    assert DETAIL in play.outcome.reason


def test_two_that_differ_go_back_to_the_newest_checkpoint_of_when_they_agreed(replicated) -> None:
    play = replicated.running(2, step=6)
    play.saved(3, slot=1)
    play.saved(5, slot=2)
    differ(play, torn=play.plan.workers, agreed=4)
    (form,) = play.ordered(Form)
    assert isinstance(form.origin, FromStorage)
    assert form.origin.step == 3, "what was saved after they agreed may be corrupt"
    play.go()
    for step in (4, 5, 6):
        play.step(step)
    play.saved(6, slot=3)
    assert play.facts.saves.stored is not None
    play.lose("w0001")
    play.settle()
    play.lose("w0002")
    assert play.facts.survived.suspect == (1, 4), "what the new generation saves is sound"


def test_nobody_goes_back_to_a_checkpoint_that_was_deleted(replicated) -> None:
    play = replicated.running(2, step=6)
    for slot, step in enumerate((2, 3, 4, 5), start=1):
        play.saved(step, slot=slot)  # three stay
    differ(play, torn=play.plan.workers, agreed=2)
    assert isinstance(play.phase, Ended)
    assert play.phase.outcome == "checkpoint"


def test_two_that_never_agreed_since_the_beginning_begin_anew(replicated) -> None:
    play = replicated.running(2, step=6)
    play.saved(5)
    differ(play, torn=play.plan.workers, agreed=0)
    (form,) = play.ordered(Form)
    assert isinstance(form.origin, Fresh)


def test_where_no_sound_checkpoint_is_left_the_run_ends_and_says_so(replicated) -> None:
    play = replicated.running(2, step=6)
    play.saved(5)
    differ(play, torn=play.plan.workers, agreed=4)
    assert isinstance(play.phase, Ended)
    assert play.phase.outcome == "checkpoint"


def test_snapshots_in_peer_memory_count_up_to_the_step_of_agreement(replicated) -> None:
    play = replicated
    play.policy = replace(play.policy, peers=True)
    play.running(2, step=6)
    differ(play, torn=play.plan.workers, agreed=4)
    snapshots = tuple(
        PeerSnapshot(peer_store="a", generation=play.facts.lineage.generation, rank=0, step=step)
        for step in (4, 5)
    )
    play(PeersReported, generation=play.facts.lineage.generation, snapshots=snapshots)
    (form,) = play.ordered(Form)
    assert form.origin.step == 4
