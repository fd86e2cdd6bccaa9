"""One run under plans of all axes, by kill and by join: the losses are those of one process."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest

from elastic_train.cluster.driver import launch
from elastic_train.cluster.faults.cluster_faults import Chaos
from elastic_train.config import Checkpoints
from elastic_train.control.fault_schedule import AddNode, FaultSchedule, KillNode, KillRank, Moment
from elastic_train.planner.plan import Mesh, Plan, even_shares
from elastic_train.planner.question import Planned, Question
from elastic_train.testing.slow_samples import SlowSamples
from jobs.pretrain_lm import Pretrain
from tests.faults.conftest import TIMING, Runs, assert_same_training

pytestmark = [pytest.mark.ring4, pytest.mark.matrix, pytest.mark.timeout(900)]
NODES, CPUS = 2, 2
STEPS, MICRO_BATCHES = 60, 7

BY_WORKERS: dict[int, tuple[Mesh, ...]] = {
    1: (Mesh(),),
    2: (Mesh(tp=2), Mesh(pp=2), Mesh(dp_shard=2)),
    3: (Mesh(dp_replicate=3), Mesh(pp=3), Mesh(dp_shard=3)),
    4: (Mesh(pp=2, tp=2), Mesh(dp_replicate=2, tp=2), Mesh(pp=2, dp_shard=2)),
    5: (Mesh(dp_replicate=5), Mesh(dp_shard=5)),
    6: (Mesh(dp_replicate=3, tp=2), Mesh(pp=3, dp_replicate=2)),
    7: (Mesh(dp_replicate=7),),
}
STAGES = {1: (), 2: ((0, 1), (1, 2)), 3: ((0, 1), (1, 2), (2, 2))}


class Slow(Pretrain):
    def dataset(self) -> SlowSamples:
        return SlowSamples(super().dataset(), 0.2)


@dataclass(frozen=True)
class Turning:
    """Another plan for the same number of workers whenever a new one is among them."""

    def __call__(self, question: Question, /) -> Planned:
        worker_slots = question.worker_slots[: question.most]
        of = BY_WORKERS[len(worker_slots)]
        newest = max(int(re.findall(r"\d+", slot.worker)[-1]) for slot in worker_slots)
        mesh = of[newest % len(of)]
        # A node's workers are neighbours: those of a tp group are on one node where that can be.
        worker_slots = tuple(sorted(worker_slots, key=lambda slot: (slot.node, slot.worker)))[: mesh.size]
        plan = Plan(
            mesh=mesh,
            workers=tuple(slot.worker for slot in worker_slots),
            nodes=tuple(slot.node for slot in worker_slots),
            shares=even_shares(MICRO_BATCHES, mesh.dp),
            stages=STAGES[mesh.pp],
        )
        return Planned(plan=plan, reason=f"{mesh} is next")


STORM = FaultSchedule(
    faults=(
        KillRank(when=Moment(step=4, phase="backward"), rank=1),
        KillRank(when=Moment(step=11, phase="reduce"), rank=0),
        KillRank(when=Moment(step=18, phase="forward"), rank=2),
        AddNode(when=Moment(step=25), node="n2", slots=3),
        KillRank(when=Moment(step=38, phase="vote"), rank=0),
        KillNode(when=Moment(step=46), node="n2"),
        KillNode(when=Moment(step=50, phase="backward"), node="n1"),
        KillRank(when=Moment(step=54, phase="optimizer"), rank=1),
    ),
    seed=0,
)


def test_plans_of_all_axes_follow_one_another(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "make_planner", lambda *_: Turning())
    task, spec = runs.spec(
        "turning",
        workers="1:7",
        standby=0,
        global_size=2 * MICRO_BATCHES,
        max_steps=STEPS,
        checkpoints=Checkpoints(every=5, keep=2),
        timing=replace(TIMING, join_window_s=3.0),
    )
    slow = Slow(**vars(task))  # so that workers which are started come while it runs
    chaos = Chaos(runs.cluster, STORM, print)
    rough = launch.fit(slow, spec, address=None, local_nodes=0, quiet=False, chaos=chaos)
    print(rough.summary)
    assert_same_training(rough, runs.calm(steps=STEPS, global_size=2 * MICRO_BATCHES))
    meshes = [r.formed.mesh for r in rough.records if r.formed is not None]
    print(meshes)
    assert sum(a != b for a, b in pairwise(meshes)) >= 9, meshes
    for axes in ("pp", "tp", "dp_shard", "dp_replicate"):
        assert any(axes in mesh for mesh in meshes), meshes
