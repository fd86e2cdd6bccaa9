"""A pure FSDP run loses a node: what was lost comes from another node's memory, and nothing from storage."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import ray

from elastic_train.checkpoint.reader import open_checkpoint
from elastic_train.checkpoint.run_directory import RunDirectory
from elastic_train.cluster.actor_names import NAMESPACE, peer_store_of, run_key
from elastic_train.cluster.driver.launch import fit, prepare_local_environment
from elastic_train.cluster.driver.result import Result
from elastic_train.cluster.faults.cluster_faults import Chaos
from elastic_train.cluster.local_cluster import LocalCluster
from elastic_train.cluster.peer_store import segments
from elastic_train.cluster.ray_calls import named_actors
from elastic_train.cluster.run_updates import RunUpdate
from elastic_train.config import Checkpoints, Parallelism
from elastic_train.control.events import CheckpointCommitted, GroupReady, PeersHeld, StepCommitted
from elastic_train.control.fault_schedule import FaultSchedule, KillNode, KillRank, Moment
from elastic_train.storage.fsspec_store import child_url, open_store
from elastic_train.storage.store import Store
from elastic_train.testing.slow_samples import SlowSamples
from jobs.pretrain_lm import Pretrain
from tests.cluster.file_reads import FileReads
from tests.faults.conftest import TIMING, Runs, assert_same_training

pytestmark = [pytest.mark.ring3, pytest.mark.timeout(600)]
NODES, CPUS = 3, 1
STEPS, FEW = 20, 13
THREE: dict[str, Any] = {
    "workers": "1:3",
    "standby": 0,
    "checkpoints": Checkpoints(every=4, keep=2, peers=1),
    "timing": replace(TIMING, join_window_s=60.0),
}
"""Three workers, of which none that is lost comes back."""


class TwoAtOnce(Chaos):
    """Two nodes end together at a step: a rank and the copy of what it held."""

    STEP = 9

    def on_update(self, update: RunUpdate, controller: Any, store: Store) -> None:
        steps = [r.event.step for r in update.records if isinstance(r.event, StepCommitted)]
        if steps and max(steps) >= self.STEP:
            for label in ("n1", "n2"):
                self._leave(self._nodes[label])


class Slow(Pretrain):
    """A step takes long enough for a snapshot to reach the other node, on a machine that is busy."""

    def dataset(self) -> SlowSamples:
        return SlowSamples(super().dataset(), 0.2)


def without_replicas(runs: Runs, name: str, chaos: Chaos, **changes: Any) -> Result:
    """A run of few steps, each part of whose state is on one worker."""
    wanted = {"max_steps": FEW, "parallelism": Parallelism(dp_replicate=1), **changes}
    task, spec = runs.spec(name, **wanted)
    return fit(Slow(**vars(task)), spec, address=None, local_nodes=0, quiet=False, chaos=chaos)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    prepare_local_environment()
    with LocalCluster(NODES, cpus=CPUS) as cluster:
        yield Runs(cluster, tmp_path_factory.mktemp("runs"))


@pytest.fixture(autouse=True)
def nothing_is_left_behind(runs: Runs) -> Iterator[None]:
    yield
    segments.sweep()
    left = [path.name for path in segments.DIRECTORY.glob(f"{segments.PREFIX}*")]
    mine = run_key(str(runs.storage), "")[1:]  # other runs of this machine may live on
    assert not [name for name in left if mine in name]


@pytest.mark.matrix
def test_a_peer_store_that_is_killed_costs_no_step_and_checkpoints_go_on_without_it(runs: Runs) -> None:
    name = "peer_store-killed"
    directory = RunDirectory(open_store(child_url(str(runs.storage), name)))
    killed = list[int]()

    def kill_a_peer_store() -> None:
        pause = threading.Event()
        while not (directory.store.exists("run.json") and directory.commits()):
            pause.wait(0.05)
        run = run_key(str(runs.storage), name)
        peer_stores = [a["name"] for a in named_actors() if peer_store_of(a["name"], run) is not None]
        pid = ray.get(ray.get_actor(min(peer_stores), NAMESPACE).ready.remote())
        os.kill(pid, signal.SIGKILL)
        killed.append(pid)

    assassin = threading.Thread(target=kill_a_peer_store, daemon=True)
    assassin.start()
    rough = runs.disturbed(
        name,
        FaultSchedule(faults=(KillRank(when=Moment(step=17, phase="backward"), rank=1),), seed=4),
        workers="2:2",
        max_steps=STEPS,
        standby=0,
        checkpoints=Checkpoints(every=3, keep=2, peers=1, pressure="wait"),
        parallelism=Parallelism(dp_replicate=1),
    )
    assassin.join(10)
    assert killed
    assert_same_training(rough, runs.calm(steps=STEPS))
    formed = [r.formed for r in rough.records if r.formed is not None]
    assert len(formed) == 2, "only the killed rank broke the group"
    assert all(step >= 12 for step in (e.step for e in rough.ledger.superseded))


@pytest.mark.matrix
def test_a_worker_that_stood_by_fills_a_lost_rank_from_the_memory_of_its_own_node(runs: Runs) -> None:
    schedule = FaultSchedule(faults=(KillRank(when=Moment(step=8, phase="backward"), rank=1),), seed=5)
    rough = without_replicas(
        runs,
        "stood-by",
        Chaos(runs.cluster, schedule, print),
        workers="2:2",
        standby=1,
        checkpoints=Checkpoints(every=50, keep=2, peers=1),
    )
    assert_same_training(rough, runs.calm(steps=FEW))
    before, after = (r.formed for r in rough.records if r.formed is not None)
    assert after.source == "mixed"
    assert after.workers[0] == before.workers[0]
    assert after.nodes[1] not in before.nodes
    ready = [r.event for r in rough.records if isinstance(r.event, GroupReady)][-1]
    assert ready.near_bytes > 0
    assert ready.far_bytes == 0
    assert len(rough.ledger.superseded) <= 1


@pytest.mark.matrix
def test_lost_nodes_without_a_replica_cost_at_most_one_step_each_and_no_read_of_storage(runs: Runs) -> None:
    """The second node that is lost held, or had its copies on, a node that had to find another one first."""
    schedule = FaultSchedule(
        faults=(
            KillNode(when=Moment(step=5, phase="backward"), node="n1"),
            KillNode(when=Moment(step=10, phase="backward"), node="n2"),
        ),
        seed=3,
    )
    with FileReads(runs.storage, ".safetensors") as reads:
        rough = without_replicas(runs, "fsdp-peers", Chaos(runs.cluster, schedule, print), **THREE)
        committed = [r.event.stored.step for r in rough.records if isinstance(r.event, CheckpointCommitted)]
        assert min(committed) < 9, "there was a checkpoint to read when a node was lost"
        assert not reads.names()
        open_checkpoint(child_url(str(runs.storage), "fsdp-peers"))["norm.weight"]["param"][:]
        assert reads.names(), "reads are counted"
    assert_same_training(rough, runs.calm(steps=FEW))
    formed = [r.formed for r in rough.records if r.formed is not None]
    assert [f.source for f in formed] == ["fresh", "mixed", "mixed"]
    assert [f.dp for f in formed] == [3, 2, 1]
    lost = [e.step for e in rough.ledger.superseded]
    assert len([step for step in lost if step < 7]) <= 1
    assert len([step for step in lost if step >= 7]) <= 1
    held = [r.event for r in rough.records if isinstance(r.event, PeersHeld)]
    assert any(one.copies > 0 for one in held)
    assert all(one.own > 0 and one.copies < one.room for one in held)
    assert all(one.spilled == 0 for one in held), "copies are refused before anything is spilled"


@pytest.mark.matrix
def test_where_both_copies_are_lost_with_their_nodes_storage_is_read_and_it_is_said(runs: Runs) -> None:
    while len(runs.cluster.nodes) < NODES:
        runs.cluster.add_node()
    chaos = TwoAtOnce(runs.cluster, FaultSchedule(faults=()), print)
    with FileReads(runs.storage, ".safetensors") as reads:
        rough = without_replicas(runs, "both-copies", chaos, **THREE)
        assert reads.names(), "what is left in memory is no whole step"
    assert_same_training(rough, runs.calm(steps=FEW))
    first, then = (r for r in rough.records if r.formed is not None)
    assert first.formed is not None
    assert then.formed is not None
    assert then.formed.source in ("storage", "mixed"), (
        "mixed where the survivor still holds the checkpoint's step"
    )
    assert "checkpoint" in then.reason
    assert len(rough.ledger.superseded) <= 8
