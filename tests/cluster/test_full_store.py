"""Object stores too small for the copies of snapshots: these are left out, and nothing is spilled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from elastic_train.cluster.driver.launch import fit, prepare_local_environment
from elastic_train.cluster.local_cluster import LocalCluster
from elastic_train.config import Checkpoints, Parallelism
from elastic_train.control.events import PeersHeld
from elastic_train.testing.single_process_run import train_alone
from jobs.pretrain_lm import trainer
from tests.faults.conftest import TIMING, assert_same_training

pytestmark = [pytest.mark.ring3, pytest.mark.matrix, pytest.mark.timeout(500)]
NODES = 2
STORE_BYTES = 80 * 2**20
STEPS = 8


@pytest.fixture
def small_stores() -> Iterator[LocalCluster]:
    prepare_local_environment()
    with LocalCluster(NODES, object_store_bytes=STORE_BYTES) as cluster:
        yield cluster


@pytest.fixture
def roomy() -> Iterator[LocalCluster]:
    prepare_local_environment()
    with LocalCluster(NODES) as cluster:
        yield cluster


def test_a_run_whose_copies_do_not_fit_goes_on_and_its_snapshots_stay_on_their_node(
    small_stores: LocalCluster, tmp_path: Path
) -> None:
    job = trainer(size="small", max_steps=STEPS, storage=str(tmp_path), name="full-store", workers="2:2")
    spec = replace(
        job.spec,
        timing=TIMING,
        checkpoints=Checkpoints(every=4, keep=2, peers=1),
        parallelism=Parallelism(dp_replicate=1),
    )
    rough = fit(job.task, spec, address=None, local_nodes=0, quiet=False)
    calm = train_alone(job.task, spec)
    assert_same_training(rough, {r.step: (r.ids_digest, r.loss) for r in calm})
    assert rough.checkpoint is not None
    held = [r.event for r in rough.records if isinstance(r.event, PeersHeld)]
    assert len({one.node for one in held}) == NODES
    share = max(one.own for one in held) / 3  # a segment has three slots
    assert 3 * share > STORE_BYTES, "there is no room for a second copy beside one and what is sent"
    assert all(one.copies < 2 * share for one in held)
    assert all(one.spilled == 0 for one in held)


@pytest.mark.parametrize(("allowed", "holds"), [(150 * 10**6, True), (60 * 10**6, False)])
def test_no_more_is_taken_of_a_node_than_is_allowed(
    tmp_path: Path, roomy: LocalCluster, allowed: int, holds: bool
) -> None:
    """A share is 34 MB: the first has room for three slots and a copy, the other for no slots."""
    job = trainer(size="small", max_steps=STEPS, storage=str(tmp_path), name="bounded", workers="2:2")
    spec = replace(
        job.spec,
        timing=TIMING,
        checkpoints=Checkpoints(every=4, keep=2, peers=1, peer_bytes=allowed),
        parallelism=Parallelism(dp_replicate=1),
    )
    found = fit(job.task, spec, address=None, local_nodes=0, quiet=False)
    assert found.checkpoint is not None
    held = [r.event for r in found.records if isinstance(r.event, PeersHeld)]
    assert bool(held) == holds
    assert all(0 < one.own + one.copies <= allowed for one in held)
    assert all(one.copies for one in held[-1:])
    said = [str(r) for r in found.records if "what Checkpoints(peer_bytes=...) leaves of its node" in str(r)]
    assert bool(said) != holds
