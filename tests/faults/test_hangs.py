"""Processes that stand still: always at the same step, or until they are replaced."""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import threading
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest
import torch.distributed as dist

import elastic_train as et
from elastic_train.cluster.driver.launch import fit
from elastic_train.cluster.faults.cluster_faults import Chaos
from elastic_train.config import Checkpoints
from elastic_train.control.events import Hung, StepCommitted, WorkerLost, WorkerReady
from elastic_train.control.fault_schedule import FaultSchedule, Moment, StopRank
from elastic_train.data.numbered import NumberedSamples
from elastic_train.errors import InfrastructureError
from elastic_train.testing.slow_samples import SlowSamples
from jobs.pretrain_lm import Pretrain
from tests.faults.conftest import TIMING, Runs, assert_same_training

pytestmark = [pytest.mark.ring4, pytest.mark.matrix, pytest.mark.timeout(400)]
NODES, CPUS = 3, 1
STEPS = 60


@dataclass(frozen=True, kw_only=True)
class Stuck(Pretrain):
    """Rank 1 stands still in the loss of a step, and whoever follows it in the same one."""

    mark: str
    CALLS = 5
    calls: ClassVar = itertools.count()

    def loss(self, output, micro_batch):
        calls = next(self.calls)  # the first one is a rehearsal's
        mark = Path(self.mark)
        if dist.get_rank() == 1 and (calls >= self.CALLS or mark.exists()):
            mark.touch()
            self.go_no_further()
        return super().loss(output, micro_batch)

    def go_no_further(self) -> None:
        threading.Event().wait()


class Killed(Stuck):
    """It dies instead, as one does that the kernel ends for want of memory."""

    def go_no_further(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Slow(Pretrain):
    def dataset(self) -> SlowSamples:
        return SlowSamples(super().dataset(), 0.08)


def test_a_rank_that_always_hangs_at_the_same_step_ends_the_run_with_everybodys_stack(
    runs: Runs, tmp_path: Path
) -> None:
    task, spec = runs.spec(
        "stuck", workers="2:2", standby=1, timing=replace(TIMING, stall_s=5.0, progress_s=15.0)
    )
    with pytest.raises(InfrastructureError, match="the same fault twice at step"):
        fit(Stuck(**vars(task), mark=str(tmp_path / "mark")), spec, address=None, local_nodes=0, quiet=False)
    hung = [record.event for record in runs.records("stuck") if isinstance(record.event, Hung)]
    assert len(hung) == 2
    for event in hung:
        assert event.cause.rank == 1
        assert len(event.stacks) == 2
        assert "in loss" in dict(event.stacks)[event.worker]


def test_a_rank_that_always_dies_at_the_same_step_ends_the_run_when_its_failures_are_spent(
    runs: Runs, tmp_path: Path
) -> None:
    task, spec = runs.spec("killed", workers="2:2", standby=1, max_failures=3)
    with pytest.raises(InfrastructureError, match="4 failures"):
        fit(Killed(**vars(task), mark=str(tmp_path / "mark")), spec, address=None, local_nodes=0, quiet=False)
    records = runs.records("killed")
    assert len([record for record in records if isinstance(record.event, WorkerLost)]) == 4


def test_a_rank_that_wakes_up_when_it_was_replaced_ends_itself_and_writes_nothing(runs: Runs) -> None:
    task, spec = runs.spec(
        "woken", workers="2:2", standby=1, max_steps=STEPS, checkpoints=Checkpoints(every=2, keep=3)
    )
    stopped = StopRank(when=Moment(step=6, phase="backward"), rank=1, seconds=15.0)
    chaos = Chaos(runs.cluster, FaultSchedule(faults=(stopped,), seed=0), print)
    rough = fit(Slow(**vars(task)), spec, address=None, local_nodes=0, quiet=False, chaos=chaos)
    assert_same_training(rough, runs.calm(steps=STEPS))
    lost = next(r for r in rough.records if isinstance(r.event, WorkerLost))
    pid = next(
        r.event.pid
        for r in rough.records
        if isinstance(r.event, WorkerReady) and r.event.worker == lost.event.worker
    )
    after = [r for r in rough.records if isinstance(r.event, StepCommitted) and r.seconds > lost.seconds + 15]
    assert after, "it woke up while the others trained on"
    with suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(60)  # it may be about to
    formed = [r.formed for r in rough.records if r.formed is not None]
    assert [lost.event.worker in group.workers for group in formed] == [True, False]


class HoldsTheInterpreter:
    """Samples, one of which takes long in code that lets no other thread of its process run."""

    CALLS, SECONDS = 20, 30

    def __init__(self, inner: NumberedSamples, mark: Path) -> None:
        self._inner, self._mark, self._given = inner, mark, 0

    def __len__(self) -> int:
        return len(self._inner)

    def __getitem__(self, sample: int) -> Any:
        self._given += 1
        if self._given == self.CALLS:
            ctypes.PyDLL(None).sleep(self.SECONDS)
            self._mark.touch()
        return self._inner[sample]


@dataclass(frozen=True, kw_only=True)
class Held(Pretrain):
    mark: str

    def dataset(self) -> HoldsTheInterpreter:
        return HoldsTheInterpreter(super().dataset(), Path(self.mark))


def test_a_worker_whose_code_holds_the_interpreter_is_slow_and_not_dead(runs: Runs, tmp_path: Path) -> None:
    task, spec = runs.spec("held", workers="2:2", standby=0, max_steps=30)
    assert spec.timing.liveness_s < HoldsTheInterpreter.SECONDS
    held = Held(**vars(task), mark=str(tmp_path / "held"))
    rough = fit(held, spec, address=None, local_nodes=0, quiet=False)
    assert (tmp_path / "held").exists()
    assert_same_training(rough, runs.calm(steps=30))
    assert not [record for record in rough.records if isinstance(record.event, WorkerLost)]


def test_an_evaluation_that_moves_may_take_longer_than_anything_that_stands_still(runs: Runs) -> None:
    task, spec = runs.spec("evaluated", workers="2:2", standby=0, max_steps=4)
    timing = replace(TIMING, stall_s=5.0, progress_s=12.0)
    evaluated = Evaluated(**vars(task))
    rough = fit(evaluated, replace(spec, timing=timing), address=None, local_nodes=0, quiet=False)
    assert rough.outcome == "finished"
    assert not [record for record in rough.records if isinstance(record.event, Hung)]


class Evaluated(Pretrain):
    def evaluation(self) -> et.Evaluation:
        return et.Evaluation(dataset=SlowSamples(Few(self.dataset()), 0.6), every=2)


class Few:
    def __init__(self, inner: NumberedSamples) -> None:
        self._inner = inner

    def __len__(self) -> int:
        return 60

    def __getitem__(self, sample: int) -> Any:
        return self._inner[sample]
