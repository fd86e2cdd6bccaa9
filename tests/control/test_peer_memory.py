"""When survivors don't hold the newest step, the peer stores are asked before anything older is taken."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic_train.control.commands import AskPeers, End, Form
from elastic_train.control.events import Adopted, CheckpointRejected, FinalReport, PeersReported, TermBegan
from elastic_train.control.states import Forming, Waiting
from elastic_train.recovery.evidence import FromStorage, Live, LocalState, Mixed, PeerSnapshot, checkpoint_of

pytestmark = pytest.mark.ring0


@pytest.fixture
def kept(play):
    """A sharded run on three nodes that have peer stores, at step 6, with a checkpoint of step 4."""
    play.policy = replace(play.policy, peers=True)
    play.running(3, step=6)
    play.parts(4)
    play.saved(4)
    return play


def snapshots(play, step: int, ranks=(0, 1, 2), peer_store: str = "b") -> tuple[PeerSnapshot, ...]:
    return tuple(
        PeerSnapshot(peer_store=peer_store, generation=play.facts.lineage.generation, rank=r, step=step)
        for r in ranks
    )


def reported(play, *held: PeerSnapshot):
    return play(PeersReported, generation=play.facts.lineage.generation, snapshots=held)


def lose_one(play) -> None:
    play.lose("w0001")
    play.settle("w0002", "w0003")


def test_a_lost_shard_comes_from_peer_memory_at_the_newest_step_that_is_whole_there(kept):
    lose_one(kept)
    assert kept.ordered(AskPeers) == [AskPeers(generation=1)]
    assert isinstance(kept.phase, Waiting)
    reported(kept, *snapshots(kept, 5), *snapshots(kept, 6, ranks=(1, 2)))
    (form,) = kept.ordered(Form)
    assert isinstance(form.origin, Mixed)
    assert form.origin.step == 5
    assert form.lineage == ((1, 0), (2, 5))
    assert kept.facts.lineage.step == 5


def test_survivors_hold_their_own_part_of_the_newest_step_so_only_the_lost_one_is_fetched(kept):
    lose_one(kept)
    reported(kept, *snapshots(kept, 6))
    (form,) = kept.ordered(Form)
    assert form.origin.step == 6
    assert {s.rank for s in form.origin.peers} == {0}
    assert form.holders == ("w0002", "w0003")


def test_nobody_is_asked_where_the_survivors_hold_the_newest_step(replicated):
    replicated.policy = replace(replicated.policy, peers=True)
    replicated.running(4, step=6)
    replicated.lose("w0001")
    replicated.settle("w0002", "w0003", "w0004")
    assert not replicated.ordered(AskPeers)
    assert isinstance(replicated.ordered(Form)[0].origin, Live)


def test_what_peer_memory_lacks_comes_from_the_last_checkpoint(kept):
    lose_one(kept)
    reported(kept, *snapshots(kept, 6, ranks=(1, 2)))
    assert isinstance(kept.ordered(Form)[0].origin, FromStorage)


def test_peer_stores_are_asked_once_for_each_group_that_ended(kept):
    lose_one(kept)
    kept.wait(1.0)
    assert not kept.ordered(AskPeers)
    reported(kept, *snapshots(kept, 6))
    assert isinstance(kept.phase, Forming)
    kept.broken("w0002", detail="the peer store of b is gone")
    for rank, worker in ((1, "w0002"), (2, "w0003")):
        held = (LocalState(generation=1, rank=rank, step=6),)
        kept(FinalReport, generation=2, worker=worker, local_states=held, error=None)
    assert kept.ordered(AskPeers) == [AskPeers(generation=2)]
    reported(kept)
    assert isinstance(kept.phase, Forming)


def test_workers_that_came_late_have_the_time_to_ask_the_peer_stores(play):
    """Later than capacity is waited for, as their starts have a limit of their own."""
    timing = replace(play.policy.timing, wait_for_capacity_s=3.0)
    play.policy = replace(play.policy, peers=True, timing=timing, max_steps=2000)
    play(TermBegan, term=1, stored=play.stored(1000, slot=2, generation=1), ever_stored=True)
    play.nodes("abc")
    play.wait(10.0)
    play.ready()
    assert play.facts.survived.asking
    for _ in range(5):
        play.wait(1.0)
        assert isinstance(play.phase, Waiting)
    play(PeersReported, generation=play.facts.lineage.generation, snapshots=())
    assert isinstance(play.phase, Forming)


def test_a_controller_that_died_while_it_asked_asks_again(kept):
    lose_one(kept)
    kept(TermBegan, term=2, stored=kept.stored(4), ever_stored=True)
    kept(Adopted, running=(("w0002", "b", 0, 6), ("w0003", "c", 0, 6)))
    assert kept.ordered(AskPeers)
    reported(kept, *snapshots(kept, 6))
    assert kept.ordered(Form)


def test_a_late_answer_changes_nothing(kept):
    before = kept.state
    assert reported(kept, *snapshots(kept, 6)).state == before
    lose_one(kept)
    kept(PeersReported, generation=7, snapshots=snapshots(kept, 6))
    assert kept.facts.survived.asking
    reported(kept)


def test_the_peer_stores_are_asked_before_storage_is_read_for_the_newest_step_too(kept):
    kept.parts(6)
    kept.saved(6, slot=2)
    lose_one(kept)
    assert kept.ordered(AskPeers)
    reported(kept, *snapshots(kept, 6))
    (form,) = kept.ordered(Form)
    assert form.origin.step == 6
    assert checkpoint_of(form.origin) is None


def test_a_checkpoint_that_is_damaged_is_no_source_of_a_mixture_either(kept):
    lose_one(kept)
    mixed = reported(kept, *snapshots(kept, 4, ranks=(1, 2))).state.phase.origin
    assert isinstance(mixed, Mixed)
    assert mixed.stored is not None
    kept(CheckpointRejected, stored=mixed.stored, problem="checksum", fallback=None)
    for worker in kept.phase.pending:
        kept(FinalReport, generation=kept.facts.lineage.generation, worker=worker, local_states=())
    reported(kept)
    assert kept.ordered(End)[0].outcome == "checkpoint"


def test_of_two_that_stand_by_the_one_whose_node_has_the_copy_takes_the_lost_rank(play):
    play.policy = replace(play.policy, peers=True, max_workers=3, standby=2)
    play.running(5, step=6)
    assert play.plan.workers == ("w0001", "w0002", "w0003")
    lose_one(play)
    reported(play, *snapshots(play, 6, peer_store="e"))
    (form,) = play.ordered(Form)
    assert form.plan.workers == ("w0005", "w0002", "w0003")
    assert [s.peer_store for s in form.origin.peers] == ["e"]
