"""Capacity that comes and goes, and what a run does when its own code or its storage is at fault."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from elastic_train.cluster.chaos import Chaos
from elastic_train.cluster.launch import fit, prepare_local_environment
from elastic_train.cluster.local import LocalCluster
from elastic_train.config import Parallelism
from elastic_train.control.faults import (
    AddNode,
    DrainNode,
    FailStorage,
    FaultSchedule,
    KillNode,
    Moment,
)
from elastic_train.errors import CapacityTimeout, ConfigError, UserCodeError
from jobs.pretrain_lm import Pretrain
from tests.faults.conftest import TIMING, Runs, assert_same_training

pytestmark = [pytest.mark.ring4, pytest.mark.timeout(600)]
NODES, CPUS = 3, 1
STEPS = 24


class Breaks(Pretrain):
    """Raises in `loss`, on the third step."""

    def loss(self, output, micro_batch):
        self.__dict__["calls"] = self.__dict__.get("calls", 0) + 1
        if self.__dict__["calls"] == 5:
            raise ValueError("a bug of the job's own")
        return super().loss(output, micro_batch)


class Empty(Pretrain):
    """Has nothing to train on."""

    def dataset(self):
        return []


class SlowSamples:
    """A data set whose samples take a while: machines come within a few steps."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __len__(self) -> int:
        return len(self._inner)

    def __getitem__(self, sample: int) -> Any:
        time.sleep(0.4)
        return self._inner[sample]


class Slow(Pretrain):
    def dataset(self) -> SlowSamples:
        return SlowSamples(super().dataset())


class Vast(Pretrain):
    """Does not fit on any worker."""

    def model(self):
        return nn.Embedding(1 << 30, 4096)


def test_an_empty_data_set_is_a_mistake_of_the_configuration(runs: Runs) -> None:
    task, spec = runs.spec("empty", max_steps=STEPS)
    with pytest.raises(ConfigError, match="no samples"):
        fit(Empty(**vars(task)), spec, address=None, local_nodes=0, quiet=True)


def test_a_model_that_fits_nowhere_is_refused_before_anything_starts(runs: Runs) -> None:
    task, spec = runs.spec("vast", max_steps=STEPS)
    with pytest.raises(ConfigError, match=r"TiB"):
        fit(Vast(**vars(task)), spec, address=None, local_nodes=0, quiet=True)
    assert not (runs.storage / "vast" / "journal").exists()


def test_user_code_that_raises_ends_the_run_with_its_own_traceback(runs: Runs) -> None:
    task, spec = runs.spec("bug", max_steps=STEPS)
    with pytest.raises(UserCodeError) as raised:
        fit(Breaks(**vars(task)), spec, address=None, local_nodes=0, quiet=True)
    text = str(raised.value)
    assert text.startswith("Traceback")
    assert "a bug of the job's own" in text
    assert "in loss" in text
    assert raised.value.rank >= 0
    assert raised.value.step >= 1


def test_a_run_that_gets_too_few_workers_says_what_it_waited_for(runs: Runs) -> None:
    task, spec = runs.spec(
        "hungry", max_steps=STEPS, workers="5:6", timing=dataclasses.replace(TIMING, wait_for_capacity_s=12.0)
    )
    with pytest.raises(CapacityTimeout, match="5 workers"):
        fit(task, spec, address=None, local_nodes=0, quiet=True)


def test_another_training_problem_under_the_same_name_is_refused(runs: Runs) -> None:
    calm = runs.calm(steps=STEPS)
    task, spec = runs.spec(f"calm-{STEPS}-12", max_steps=STEPS, global_size=18)
    with pytest.raises(ConfigError, match=r"batch\.global_size"):
        fit(task, spec, address=None, local_nodes=0, quiet=True)
    task, spec = runs.spec(f"calm-{STEPS}-12", max_steps=STEPS)
    again = fit(task, spec, address=None, local_nodes=0, quiet=True)
    assert again.outcome == "finished"
    assert again.ledger.kept == calm.ledger.kept, "a finished run is complete already"


def test_workers_go_and_come_and_the_losses_stay(runs: Runs) -> None:
    schedule = FaultSchedule(
        faults=(
            KillNode(when=Moment(step=5, phase="forward"), node="n1"),
            FailStorage(when=Moment(step=9), seconds=1.0),
            AddNode(when=Moment(step=10), node="n3", slots=2),
            DrainNode(when=Moment(step=18), node="n0", notice_s=30.0),
        ),
        seed=3,
    )
    rough = runs.disturbed("resized", schedule, workers="2:4", global_size=13, max_steps=STEPS, standby=0)
    assert_same_training(rough, runs.calm(steps=STEPS, global_size=13))
    assert rough.ledger.superseded == ()


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


@pytest.mark.parametrize("global_size", [pytest.param(12, marks=pytest.mark.matrix), 13])
def test_three_workers_become_two_then_four_then_one_then_three(global_size: int) -> None:
    """Its own cluster: the sizes say how many nodes there are."""
    prepare_local_environment()
    with tempfile.TemporaryDirectory() as storage, LocalCluster(NODES, cpus=CPUS) as cluster:
        runs = Runs(cluster, Path(storage))
        task, spec = runs.spec(
            "resized",
            workers="1:4",
            standby=0,
            parallelism=Parallelism(dp_shard=1),
            global_size=global_size,
            max_steps=32,
        )
        chaos = Chaos(cluster, RESIZES, print)
        rough = fit(Slow(**vars(task)), spec, address=None, local_nodes=0, quiet=False, chaos=chaos)
        calm = runs.calm(steps=32, global_size=global_size)
    assert_same_training(rough, calm)
    assert rough.ledger.superseded == ()
    sizes = [len(r.formed.workers) for r in rough.records if r.formed is not None]
    assert is_subsequence([3, 2, 4, 1, 3], sizes), sizes


def is_subsequence(wanted: Iterable[int], found: Iterable[int]) -> bool:
    left = iter(found)
    return all(size in left for size in wanted)
