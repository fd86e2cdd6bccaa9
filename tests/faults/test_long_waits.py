"""Work of unknown length, and controllers that are killed while groups form.

Data sets, evaluations and saves take longer here than any deadline of the engine's own: in proportion to
deadlines that are shortened, and once at full length under those that a run has by itself.
"""

from __future__ import annotations

import os
import re
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import ray

import elastic_train as et
from elastic_train.cluster.driver.launch import fit
from elastic_train.cluster.driver.result import Result
from elastic_train.cluster.faults.cluster_faults import Chaos
from elastic_train.cluster.run_updates import RunUpdate
from elastic_train.config import Checkpoints, Timing
from elastic_train.control.events import StepCommitted
from elastic_train.control.fault_schedule import AddNode, FaultSchedule, KillRank, Moment
from elastic_train.data.numbered import NumberedSamples
from elastic_train.storage.store import Store
from elastic_train.testing.slow_samples import SlowSamples
from jobs.pretrain_lm import Pretrain
from tests.faults.conftest import TIMING, Runs, assert_same_training

pytestmark = [pytest.mark.ring4, pytest.mark.matrix, pytest.mark.timeout(600)]
NODES, CPUS = 2, 1
LENGTHS = ("short", "true")


def counted(result: Result) -> int:
    """Failures of machines that were counted."""
    said = [re.search(r"(\d+) failures? without progress", r.reason) for r in result.records]
    return sum(found is not None for found in said)


# -- a data set that takes long


@dataclass(frozen=True, kw_only=True)
class Prepares(Pretrain):
    """Its data set takes long in every process but the first runs'."""

    mark: str
    seconds: float

    def dataset(self) -> NumberedSamples:
        if Path(self.mark).exists():
            time.sleep(self.seconds)
        return super().dataset()


@pytest.mark.parametrize(
    ("seconds", "timing"), [(25.0, replace(TIMING, form_s=10.0, settle_s=8.0)), (180.0, TIMING)], ids=LENGTHS
)
def test_a_data_set_that_takes_longer_than_forming_may_is_waited_for_on_resume(
    runs: Runs, tmp_path: Path, seconds: float, timing: Timing
) -> None:
    mark = tmp_path / "prepares"
    name = f"prepares-{seconds:.0f}"
    task, spec = runs.spec(name, workers="2:2", standby=0, max_steps=12, timing=timing)
    job = Prepares(**vars(task), mark=str(mark), seconds=seconds)
    stops = Stops(runs, at=6)
    first = fit(job, spec, address=None, local_nodes=0, quiet=False, chaos=stops)
    assert first.outcome == "stopped"
    mark.touch()
    second = fit(job, spec, address=None, local_nodes=0, quiet=False)
    assert_same_training(second, runs.calm(steps=12))
    assert counted(second) == 0
    assert sum(r.formed is not None for r in second.records) == 2, "one group of each submission"


# -- an evaluation that takes long


class Few:
    def __init__(self, inner: NumberedSamples, samples: int) -> None:
        self._inner, self._samples = inner, samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, sample: int) -> Any:
        return self._inner[sample]


@dataclass(frozen=True, kw_only=True)
class Evaluated(Pretrain):
    samples: int  # a second each, for one of the group

    def evaluation(self) -> et.Evaluation:
        return et.Evaluation(dataset=SlowSamples(Few(self.dataset(), self.samples), 1.0), every=6)


@pytest.mark.parametrize(
    ("seconds", "timing"),
    [(30, replace(TIMING, settle_s=5.0, progress_s=15.0, stall_s=5.0)), (120, TIMING)],
    ids=LENGTHS,
)
def test_nodes_that_arrive_in_a_long_evaluation_are_taken_after_it(
    runs: Runs, seconds: int, timing: Timing
) -> None:
    """It takes half a minute, where a group that is silent at a boundary has five seconds; or two minutes."""
    there = sum(n["Alive"] and n["Resources"].get("CPU", 0) > 0 for n in ray.nodes())  # the head has none
    task, spec = runs.spec(
        f"arrivals-{seconds}", workers=f"{there}:{there + 2}", standby=0, max_steps=12, timing=timing
    )
    coming = FaultSchedule(
        faults=tuple(AddNode(when=Moment(step=7), node=f"n{there + n}") for n in range(2)), seed=0
    )
    chaos = Chaos(runs.cluster, coming, print)
    job = Evaluated(**vars(task), samples=there * seconds)
    rough = fit(job, spec, address=None, local_nodes=0, quiet=False, chaos=chaos)
    assert_same_training(rough, runs.calm(steps=12))
    assert counted(rough) == 0
    assert rough.ledger.superseded == ()
    formed = [len(r.formed.workers) for r in rough.records if r.formed is not None]
    told = [r.reason for r in rough.records if "the group does not grow" in r.reason]
    assert formed[0] == there
    assert formed[-1] == there + 2 or told, "they are taken, or what is left does not pay for it"


# -- a save that takes long


class Stops(Chaos):
    """Asks a run to stop once a step is committed."""

    def __init__(self, runs: Runs, *, at: int) -> None:
        super().__init__(runs.cluster, FaultSchedule(faults=()), print)
        self._at, self._asked = at, False

    def on_update(self, update: RunUpdate, controller: Any, store: Store) -> None:
        steps = [r.event.step for r in update.records if isinstance(r.event, StepCommitted)]
        if not self._asked and steps and max(steps) >= self._at:
            self._asked = True
            controller.stop.remote("the test has seen enough")


@pytest.mark.parametrize("peers", ["auto", None])
@pytest.mark.parametrize(
    ("bandwidth", "least_s", "timing"),
    [(12_000.0, 16.0, replace(TIMING, settle_s=5.0, progress_s=8.0, stall_s=5.0)), (2_500.0, 60.0, TIMING)],
    ids=LENGTHS,
)
def test_a_stop_waits_for_a_save_whose_bytes_flow_however_long_it_takes(
    runs: Runs, peers: Any, bandwidth: float, least_s: float, timing: Timing
) -> None:
    """Nothing was measured before: this is the run's first checkpoint, and takes three times what any silence
    may; or a minute and a half.
    """
    slow = Checkpoints(every=1000, keep=2, bandwidth=bandwidth, peers=peers)
    task, spec = runs.spec(
        f"slow-save-{peers}-{bandwidth:.0f}",
        workers="2:2",
        standby=0,
        max_steps=2000,
        timing=timing,
        checkpoints=slow,
    )
    began = time.monotonic()
    stopped = fit(task, spec, address=None, local_nodes=0, quiet=False, chaos=Stops(runs, at=6))
    assert stopped.outcome == "stopped"
    last = max(r.event.step for r in stopped.records if isinstance(r.event, StepCommitted))
    assert stopped.checkpoint is not None
    assert runs.saved(spec.name) == last, "what was committed is kept"
    asked = next(r.seconds for r in stopped.records if "stopping at the next" in r.reason)
    end = stopped.records[-1].seconds
    print(f"the stop took {end - asked:.0f} s of {time.monotonic() - began:.0f} s")
    assert end - asked > least_s, "it was slow enough to show something"


# -- controllers that die while groups form


class KillsWhileForming(Chaos):
    """Kills the controller whenever a group begins to form, a few times in a row."""

    IN_A_ROW = 4

    def __init__(self, runs: Runs, schedule: FaultSchedule) -> None:
        super().__init__(runs.cluster, schedule, print)
        self._left, self._generation = self.IN_A_ROW, 0
        self.kills = 0

    def on_update(self, update: RunUpdate, controller: Any, store: Store) -> None:
        for noted in update.records:
            if isinstance(noted.event, StepCommitted):
                self._left = self.IN_A_ROW
            elif noted.formed is not None and noted.formed.generation > self._generation and self._left:
                self._generation = noted.formed.generation
                self._left -= 1
                self.kills += 1
                os.kill(ray.get(controller.pid.remote(), timeout=60), signal.SIGKILL)
                return
        super().on_update(update, controller, store)


def test_controllers_that_are_killed_while_groups_form_cost_no_step(runs: Runs) -> None:
    """Twenty of them: four in a row, at the first group and after each of four losses."""
    losses = tuple(KillRank(when=Moment(step=5 * n, phase="backward"), rank=n % 2) for n in range(1, 5))
    chaos = KillsWhileForming(runs, FaultSchedule(faults=losses, seed=0))
    task, spec = runs.spec("forming", workers="2:2", standby=0, max_steps=25)
    rough = fit(task, spec, address=None, local_nodes=0, quiet=False, chaos=chaos)
    assert_same_training(rough, runs.calm(steps=25))
    assert chaos.kills >= 16
    assert counted(rough) <= len(losses)
