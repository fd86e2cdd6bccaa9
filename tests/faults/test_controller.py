"""The controller is killed and stands still; its workers train on meanwhile."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray

from elastic_train.cluster.driver.launch import fit
from elastic_train.cluster.faults.cluster_faults import Chaos
from elastic_train.cluster.run_updates import RunUpdate
from elastic_train.control.events import StepCommitted
from elastic_train.control.fault_schedule import FaultSchedule, KillController, Moment
from elastic_train.data.identity import spread
from elastic_train.data.numbered import NumberedSamples
from elastic_train.storage.store import Store
from elastic_train.testing.slow_samples import SlowSamples
from jobs.pretrain_lm import Pretrain
from tests.faults.conftest import Runs, assert_same_training

pytestmark = [pytest.mark.ring4, pytest.mark.timeout(900)]
NODES, CPUS = 2, 2
EVERY, BEYOND = 5, 3
"""Steps from one fault to the next, and those that the group may train on before its controller is back."""
GLOBAL_SIZE, WORKERS = 12, 2


class Slow(Pretrain):
    def dataset(self) -> SlowSamples:
        return SlowSamples(super().dataset(), 0.08)


class Allowed:
    """Samples of which a process is given as many as a file says by then; what is checked at the start is
    free.
    """

    def __init__(self, inner: NumberedSamples, gate: Path) -> None:
        self._inner, self._gate, self._given = inner, gate, 0
        self._free = frozenset(spread(inner))

    def __len__(self) -> int:
        return len(self._inner)

    def __getitem__(self, sample: int) -> Any:
        if sample in self._free:
            return self._inner[sample]
        while self._given >= int(self._gate.read_text()):
            time.sleep(0.02)
        self._given += 1
        return self._inner[sample]


@dataclass(frozen=True, kw_only=True)
class Gated(Pretrain):
    gate: Path

    def dataset(self) -> Allowed:
        return Allowed(super().dataset(), self.gate)


class Allows(Chaos):
    """Lets the group train until a few steps beyond the kill of the present controller.

    Sees, too, which libraries the controller's process has loaded by the time that its group trains.
    """

    libraries = ""

    def __init__(self, runs: Runs, schedule: FaultSchedule, gate: Path) -> None:
        super().__init__(runs.cluster, schedule, print)
        self._gate = gate
        self._allow(0)

    def on_update(self, update: RunUpdate, controller: Any, store: Store) -> None:
        self._allow(EVERY * update.term + BEYOND)
        if not self.libraries and any(isinstance(r.event, StepCommitted) for r in update.records):
            pid = ray.get(controller.pid.remote(), timeout=60)
            self.libraries = Path(f"/proc/{pid}/maps").read_text()
        super().on_update(update, controller, store)

    def _allow(self, steps: int) -> None:
        new = self._gate.with_suffix(".new")
        new.write_text(str(steps * GLOBAL_SIZE // WORKERS))
        new.replace(self._gate)


class Pauses(Chaos):
    """Stops the controller's process at a step and lets it go on later."""

    STEP, SECONDS = 20, 10.0

    def on_update(self, update: RunUpdate, controller: Any, store: Store) -> None:
        super().on_update(update, controller, store)
        steps = [r.event.step for r in update.records if isinstance(r.event, StepCommitted)]
        if self._waits and steps and max(steps) >= self.STEP:
            self._waits = False
            pid = ray.get(controller.pid.remote(), timeout=60)
            os.kill(pid, signal.SIGSTOP)
            threading.Timer(self.SECONDS, os.kill, (pid, signal.SIGCONT)).start()

    _waits = True


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.matrix)])
def test_a_killed_controller_adopts_the_group_that_trains_on(runs: Runs, kills: int, tmp_path: Path) -> None:
    steps = EVERY * (kills + 1)
    faults = tuple(KillController(when=Moment(step=EVERY * (n + 1))) for n in range(kills))
    looks = Allows(runs, FaultSchedule(faults=faults), tmp_path / "gate")
    task, spec = runs.spec(f"killed-{kills}", workers="2:2", standby=0, max_steps=steps)
    gated = Gated(**vars(task), gate=tmp_path / "gate")
    rough = fit(gated, spec, address=None, local_nodes=0, quiet=False, chaos=looks)
    assert_same_training(rough, runs.calm(steps=steps))
    assert rough.ledger.superseded == ()
    assert groups(rough) == 1, "its workers never left their group"
    assert looks.libraries
    assert "libtorch" not in looks.libraries, "starting workers takes the controller no import of theirs"
    terms = [r for r in rough.records if type(r.event).__name__ == "TermBegan"]
    assert len(terms) == kills + 1


@pytest.mark.matrix
def test_a_controller_that_stands_still_for_ten_seconds_blames_nobody(runs: Runs) -> None:
    chaos = Pauses(runs.cluster, FaultSchedule(faults=()), print)
    task, spec = runs.spec("stopped", workers="2:2", standby=0, max_steps=60)
    rough = fit(Slow(**vars(task)), spec, address=None, local_nodes=0, quiet=False, chaos=chaos)
    assert_same_training(rough, runs.calm(steps=60))
    assert groups(rough) == 1
    assert any("stood still" in r.reason for r in rough.records)


def groups(result: Any) -> int:
    return sum(r.formed is not None for r in result.records)
