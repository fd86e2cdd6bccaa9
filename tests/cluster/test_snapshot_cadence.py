"""How often peer snapshots come follows from what the steps beside them took."""

from __future__ import annotations

import pytest

from elastic_train.cluster.worker.snapshot_cadence import SnapshotCadence
from elastic_train.control.schedule import peer_interval_s

pytestmark = pytest.mark.ring0


def trained(cadence: SnapshotCadence, snapshots: int, *, beside_s: float, flushing: bool = False) -> None:
    """Snapshots during one step of `beside_s` each, with three steps of 0.1 s after it."""
    for _ in range(snapshots):
        cadence.begun()
        cadence.step_took(beside_s, unfinished=False, flushing=flushing)
        for _ in range(3):
            cadence.step_took(0.1, unfinished=False, flushing=False)


def test_what_steps_beside_snapshots_take_longer_is_what_one_costs() -> None:
    cadence = SnapshotCadence("auto")
    assert cadence.due, "the first one waits for nothing"
    cadence.copy_s = 0.001
    trained(cadence, 5, beside_s=0.13)
    assert cadence.cost_s == pytest.approx(0.03)
    assert not cadence.due, f"one is due every {peer_interval_s(0.03)} s"
    cadence.restart()
    assert cadence.cost_s == 0.001


def test_a_snapshot_that_goes_to_storage_as_well_tells_nothing_of_the_others() -> None:
    cadence = SnapshotCadence("auto")
    trained(cadence, 5, beside_s=0.1)
    trained(cadence, 5, beside_s=9.0, flushing=True)
    assert cadence.cost_s == 0.0


def test_a_number_of_steps_is_kept_whatever_it_costs() -> None:
    cadence = SnapshotCadence(1)
    trained(cadence, 5, beside_s=9.0)
    cadence.count_step()
    assert cadence.due
