"""One run on every size of a group, by kill and by join."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from elastic_train.cluster.driver.launch import fit
from elastic_train.cluster.faults.cluster_faults import Chaos
from elastic_train.cluster.local_cluster import LocalCluster
from elastic_train.config import Parallelism
from elastic_train.control.fault_schedule import AddNode, FaultSchedule, KillNode, Moment
from elastic_train.testing.slow_samples import SlowSamples
from jobs.pretrain_lm import Pretrain
from tests.faults.conftest import Clusters, Runs, assert_same_training

pytestmark = [pytest.mark.ring4, pytest.mark.matrix, pytest.mark.timeout(600)]
STEPS = 32


class Slow(Pretrain):
    def dataset(self) -> SlowSamples:
        return SlowSamples(super().dataset(), 0.4)


@pytest.fixture
def runs(clusters: Clusters, tmp_path: Path) -> Iterator[Runs]:
    """A cluster of its own for each run: its sizes say how many nodes there are."""
    clusters.close()  # a process is connected to one at most
    with LocalCluster(3, cpus=1) as cluster:
        yield Runs(cluster, tmp_path)


RESIZES = FaultSchedule(
    faults=(
        KillNode(when=Moment(step=3, phase="backward"), node="n1"),
        AddNode(when=Moment(step=4), node="n3", slots=2),
        KillNode(when=Moment(step=18, phase="backward"), node="n2"),
        KillNode(when=Moment(step=18), node="n3"),
        AddNode(when=Moment(step=20), node="n4", slots=2),
    ),
    seed=0,
)


@pytest.mark.parametrize("global_size", [12, 13])
def test_three_workers_become_two_then_four_then_one_then_three(runs: Runs, global_size: int) -> None:
    task, spec = runs.spec(
        "resized",
        workers="1:4",
        standby=0,
        parallelism=Parallelism(dp_shard=1),
        global_size=global_size,
        max_steps=STEPS,
    )
    chaos = Chaos(runs.cluster, RESIZES, print)
    rough = fit(Slow(**vars(task)), spec, address=None, local_nodes=0, quiet=False, chaos=chaos)
    calm = runs.calm(steps=STEPS, global_size=global_size)
    assert_same_training(rough, calm)
    assert rough.ledger.superseded == ()
    sizes = [len(r.formed.workers) for r in rough.records if r.formed is not None]
    assert is_subsequence([3, 2, 4, 1, 3], sizes), sizes


def is_subsequence(wanted: Iterable[int], found: Iterable[int]) -> bool:
    left = iter(found)
    return all(size in left for size in wanted)
