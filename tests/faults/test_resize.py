"""Capacity that comes and goes, and what a run does when its own code or its storage is at fault."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import nn

from elastic_train.cluster.driver.launch import fit
from elastic_train.cluster.faults.cluster_faults import Chaos
from elastic_train.control.events import StepCommitted
from elastic_train.control.fault_schedule import (
    AddNode,
    DrainNode,
    FailStorage,
    FaultSchedule,
    KillNode,
    Moment,
)
from elastic_train.errors import CapacityTimeout, ConfigError, UserCodeError
from elastic_train.testing.slow_samples import SlowSamples
from elastic_train.train.task import Rules
from jobs.pretrain_lm import Pretrain
from tests.faults.conftest import TIMING, Runs, assert_same_training

pytestmark = [pytest.mark.ring4, pytest.mark.timeout(600)]
NODES, CPUS = 3, 1
STEPS = 24


class Breaks(Pretrain):
    """Raises in `loss` of rank 1, while the other waits for it. The first call is a rehearsal's."""

    calls = itertools.count()

    def loss(self, output, micro_batch):
        if next(self.calls) == 5 and dist.get_rank() == 1:
            raise ValueError("a bug of the job's own")
        return super().loss(output, micro_batch)


class Slow(Pretrain):
    """Takes a second or so for each step, so that nodes can come and be drained meanwhile."""

    def dataset(self):
        return SlowSamples(super().dataset(), 0.2)


class Empty(Pretrain):
    """Has nothing to train on."""

    def dataset(self):
        return []


class Missing(Pretrain):
    """Reads what is not there."""

    def dataset(self):
        return Path("/no/such/directory/samples.txt").read_text()


class Vast(Pretrain):
    """Does not fit on any worker."""

    def parallelize(self):
        return Rules()

    def model(self):
        return nn.Embedding(1 << 30, 4096)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("job", "error", "said"),
    [(Empty, ConfigError, "no samples"), (Missing, UserCodeError, "/no/such/directory/samples.txt")],
)
def test_a_data_set_that_is_empty_or_missing_ends_the_run_at_the_first_try(
    runs: Runs, job: type[Pretrain], error: type[Exception], said: str
) -> None:
    task, spec = runs.spec(job.__name__, max_steps=STEPS)
    with pytest.raises(error, match=said):
        fit(job(**vars(task)), spec, address=None, local_nodes=0, quiet=True)
    assert sum(r.formed is not None for r in runs.records(job.__name__)) <= 1


@pytest.mark.matrix
def test_a_model_that_fits_nowhere_is_refused_before_anything_starts(runs: Runs) -> None:
    task, spec = runs.spec("vast", max_steps=STEPS)
    with pytest.raises(ConfigError, match=r"TiB"):
        fit(Vast(**vars(task)), spec, address=None, local_nodes=0, quiet=True)
    assert not (runs.storage / "vast" / "journal").exists()


def test_user_code_that_raises_ends_the_run_with_its_own_traceback(runs: Runs) -> None:
    task, spec = runs.spec("bug", workers="2:2", max_steps=STEPS)
    with pytest.raises(UserCodeError) as raised:
        fit(Breaks(**vars(task)), spec, address=None, local_nodes=0, quiet=True)
    text = str(raised.value)
    assert text.startswith("Traceback")
    assert "a bug of the job's own" in text
    assert "in loss" in text
    assert raised.value.rank == 1
    assert raised.value.node
    records = runs.records("bug")
    last = max(r.seconds for r in records if isinstance(r.event, StepCommitted))
    assert max(r.event.step for r in records if isinstance(r.event, StepCommitted)) == raised.value.step - 1
    assert next(r.seconds for r in records if r.ended) - last < 25.0, "nobody was taken for hung first"
    assert sum(r.formed is not None for r in records) == 1, "nothing was tried again"


@pytest.mark.matrix
def test_a_run_that_gets_too_few_workers_says_what_it_waited_for(runs: Runs) -> None:
    task, spec = runs.spec(
        "hungry", max_steps=STEPS, workers="5:6", timing=dataclasses.replace(TIMING, wait_for_capacity_s=12.0)
    )
    with pytest.raises(CapacityTimeout, match="5 workers of 1 CPU"):
        fit(task, spec, address=None, local_nodes=0, quiet=True)


@pytest.mark.matrix
def test_another_training_problem_under_the_same_name_is_refused(runs: Runs) -> None:
    task, spec = runs.spec("short", max_steps=6)
    first = fit(task, spec, address=None, local_nodes=0, quiet=True)
    task, spec = runs.spec("short", max_steps=6, global_size=18)
    with pytest.raises(ConfigError, match=r"batch\.global_size"):
        fit(task, spec, address=None, local_nodes=0, quiet=True)
    task, spec = runs.spec("short", max_steps=6)
    again = fit(task, spec, address=None, local_nodes=0, quiet=True)
    assert again.outcome == "finished"
    assert again.ledger.kept == first.ledger.kept, "a finished run is complete already"


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
    reported = runs.storage / "told"
    task, spec = runs.spec(
        "resized",
        workers="2:4",
        global_size=13,
        max_steps=STEPS,
        standby=0,
        on_event=f"cat >> {reported}; echo >> {reported}",
    )
    chaos = Chaos(runs.cluster, schedule, print)
    rough = fit(Slow(**vars(task)), spec, address=None, local_nodes=0, quiet=False, chaos=chaos)
    assert_same_training(rough, runs.calm(steps=STEPS, global_size=13))
    assert rough.ledger.superseded == ()
    events = [json.loads(line) for line in reported.read_text().splitlines()]
    plans = [r.formed.plan for r in rough.records if r.formed is not None]
    assert len(plans) >= 3, "after the loss and, at the latest, after the drain"
    assert [e["plan"] for e in events if e["event"] == "formed"] == plans
    assert any(e["event"] == "nodes_changed" and e["node"] for e in events), "the drain"
