"""What a peer store says of its snapshots: seldom, and in figures that add up."""

from __future__ import annotations

import pytest

from elastic_train.checkpoint.snapshot import Snapshot
from elastic_train.cluster.messages import SealedSnapshot
from elastic_train.cluster.peer_store.peer_figures import TELL_S, PeerFigures, SnapshotSizes
from elastic_train.control.events import PeersHeld
from elastic_train.geometry.fragments import Fragments

pytestmark = pytest.mark.ring0


def sealed(worker: str, step: int, *, generation: int = 1) -> SealedSnapshot:
    snapshot = Snapshot(
        generation=generation, rank=0, step=step, fragments=Fragments.of([]), document={}, seconds=0.125
    )
    return SealedSnapshot(worker=worker, snapshot=snapshot, first=False, cost_s=0.25)


def test_a_peer_store_tells_how_often_snapshots_come_what_they_take_and_what_was_spilled_since_it_began() -> (
    None
):
    now, spilled, said = [0.0], [500], list[PeersHeld]()
    figures = PeerFigures(
        "n0",
        lambda: SnapshotSizes(own=30, copies=20, room=100, spilled=spilled[0]),
        said.append,
        clock=lambda: now[0],
    )
    spilled[0] = 507
    for step in (1, 3, 5, 9):
        figures.sealed(sealed("w0", step))
        figures.sealed(sealed("w1", step))
    assert [(held.step, held.every) for held in said] == [(3, 2.0)], "not again within a while"
    assert (said[0].own, said[0].copies, said[0].spilled, said[0].cost_s) == (30, 20, 7, 0.25)
    now[0] = TELL_S
    figures.sealed(sealed("w0", 11))
    assert said[-1].every == pytest.approx(8 / 3)
    now[0] = 2 * TELL_S
    figures.sealed(sealed("w0", 12, generation=2))  # steps between two generations are no interval
    assert len(said) == 2
    figures.sealed(sealed("w0", 13, generation=2))
    assert (said[-1].step, said[-1].every) == (13, 1.0)
