"""A kill of either side at every point of a preparation: before a growth, a drain and another plan."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import ray

from elastic_train.cluster.driver.launch import fit
from elastic_train.cluster.driver.result import Result
from elastic_train.cluster.faults.cluster_faults import Chaos
from elastic_train.cluster.local_cluster import LocalCluster
from elastic_train.cluster.ray_private import draining_nodes
from elastic_train.config import Parallelism
from elastic_train.control.events import GroupBroken, StepCommitted, WorkerLost
from elastic_train.control.fault_schedule import PREPARING, DrainNode, Fault, FaultSchedule, KillRank, Moment
from elastic_train.data.numbered import NumberedSamples
from jobs.pretrain_lm import Pretrain
from tests.faults.conftest import TIMING, WHOLE, Runs, assert_same_training

pytestmark = [pytest.mark.ring4, pytest.mark.timeout(600)]
NODES, CPUS = 3, 1
STEPS = 60
TOGETHER = replace(TIMING, join_window_s=8.0)
"""A third worker that is late for the first group grows it, after which none is considered for long."""
SLOWLY, QUICKLY = 0.2, 0.01  # seconds a sample: a busy machine takes a minute to start a process again
OF_NEWCOMERS = ("entered", "taken up", "data", "warmed up", "built")
IN_THE_SWITCH = ("swapping", "swapped")
NEWCOMER, OTHER = 2, 0  # ranks of the next group
CASES = [
    (way, who, point)
    for way in ("growth", "drain", "another plan")
    for point in PREPARING
    for who in (OTHER, NEWCOMER)
    if who == OTHER or way != "drain"
    if who == NEWCOMER or point not in OF_NEWCOMERS
]


def strikes_done(marks: Path) -> set[str]:
    """The faults that were done, but for the first one, which leads to the preparation. A mark that is being
    written has another name.
    """
    return {path.name for path in marks.glob("[0-9]" * 4)} - {"0000"}


class UntilStruck:
    """Samples that take a while until the strike was done, of which `marks` then holds a file."""

    def __init__(self, inner: NumberedSamples, marks: Path) -> None:
        self._inner, self._marks, self._struck = inner, marks, False

    def __len__(self) -> int:
        return len(self._inner)

    def __getitem__(self, sample: int) -> Any:
        self._struck = self._struck or bool(strikes_done(self._marks))
        time.sleep(QUICKLY if self._struck else SLOWLY)
        return self._inner[sample]


@dataclass(frozen=True, kw_only=True)
class Slow(Pretrain):
    """Takes a while for each step until it is struck, so that processes come back before it ends."""

    marks: str

    def dataset(self) -> UntilStruck:
        return UntilStruck(super().dataset(), Path(self.marks))


def replace_drained_nodes(cluster: LocalCluster) -> None:
    """A notice outlasts the run that it came in: its node takes part in none that follows, and ends when
    nothing runs on it.
    """
    living = {info["NodeID"] for info in ray.nodes() if info["Alive"]} - draining_nodes().keys()
    for node in [node.node_id for node in cluster.nodes if node.node_id not in living]:
        cluster.kill_node(node)
    while len(cluster.nodes) < NODES:
        cluster.add_node()


def strike(runs: Runs, way: str, who: int, point: str) -> Result:
    """Three train, one is lost and comes back, or its node is drained; the strike is at the preparation."""
    replace_drained_nodes(runs.cluster)
    first: Fault = KillRank(when=Moment(step=3, phase="backward"), rank=2)
    if way == "drain":
        first = DrainNode(when=Moment(step=8), node="n2", notice_s=60.0)
    when = Moment(step=3, phase="preparing", micro_batch=PREPARING.index(point))
    task, spec = runs.spec(
        f"{way}-{who}-{point}".replace(" ", "_"),
        workers="2:3",
        max_steps=STEPS,
        standby=0,
        timing=WHOLE if way == "drain" else TOGETHER,
        parallelism=Parallelism(dp_replicate=1) if way == "another plan" else Parallelism(dp_shard=1),
    )
    struck = range(NODES) if point in OF_NEWCOMERS else (who,)  # a newcomer may get any rank of a cut plan
    schedule = FaultSchedule(faults=(first, *(KillRank(when=when, rank=rank) for rank in struck)), seed=0)
    chaos = Chaos(runs.cluster, schedule, print)
    marks = str(runs.storage / spec.name / "chaos")
    rough = fit(Slow(**vars(task), marks=marks), spec, address=None, local_nodes=0, quiet=False, chaos=chaos)
    assert_same_training(rough, runs.calm(steps=STEPS))
    assert strikes_done(Path(marks)), "the strike happened"
    return rough


def check_that_the_group_trained_on(rough: Result) -> None:
    """The loss of who was not in it yet cost the group that trained meanwhile nothing."""
    events = [r.event for r in rough.records]
    at = max(i for i, event in enumerate(events) if isinstance(event, WorkerLost))
    generation = max(e.generation for e in events[:at] if isinstance(e, StepCommitted))
    after = [e for e in events[at:] if isinstance(e, StepCommitted | GroupBroken)]
    ours = [e for e in after if e.generation == generation]
    assert any(isinstance(e, StepCommitted) for e in ours)
    assert not any(isinstance(e, GroupBroken) for e in ours)


@pytest.mark.matrix
@pytest.mark.parametrize(("way", "who", "point"), CASES)
def test_a_kill_at_any_point_of_a_preparation_leaves_the_losses_as_they_were(
    runs: Runs, way: str, who: int, point: str
) -> None:
    rough = strike(runs, way, who, point)
    if way == "growth":
        assert rough.ledger.superseded == (), "no step is lost where others hold everything"
    if point in OF_NEWCOMERS or ((way, who) == ("growth", NEWCOMER) and point not in IN_THE_SWITCH):
        check_that_the_group_trained_on(rough)


@pytest.mark.parametrize(
    ("way", "who", "point"),
    [("growth", NEWCOMER, "built"), ("growth", OTHER, "met"), ("drain", OTHER, "swapped")],
)
def test_a_kill_in_a_preparation_leaves_the_losses_as_they_were(
    runs: Runs, way: str, who: int, point: str
) -> None:
    rough = strike(runs, way, who, point)
    assert rough.ledger.superseded == ()
    if who == NEWCOMER:
        check_that_the_group_trained_on(rough)
