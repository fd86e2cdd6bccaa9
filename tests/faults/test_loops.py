"""A loop of a user on a real cluster: kills of ranks, of a node and of the controller, and growth."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

import pytest

from elastic_train.cluster.driver.launch import fit
from elastic_train.cluster.faults.cluster_faults import Chaos
from elastic_train.config import Batch
from elastic_train.control.events import WorkerLost
from elastic_train.control.fault_schedule import (
    AddNode,
    FaultSchedule,
    KillController,
    KillNode,
    KillRank,
    Moment,
)
from elastic_train.observe.reconfigurations import history
from elastic_train.testing.single_process_run import train_alone
from elastic_train.train.declaration.loop_task import LoopTask
from tests.faults.conftest import WHOLE, Runs
from tests.tasks import loops

pytestmark = [pytest.mark.ring4, pytest.mark.timeout(600)]
NODES, CPUS = 3, 2
STEPS = 30

FAULTS = FaultSchedule(
    faults=(
        KillRank(when=Moment(step=4, phase="backward"), rank=1),
        KillController(when=Moment(step=8)),
        KillRank(when=Moment(step=12, phase="evaluation"), rank=0),
        KillNode(when=Moment(step=18, phase="forward"), node="n1"),
        AddNode(when=Moment(step=22), node="n3", slots=2),
    ),
    seed=0,
)


@pytest.mark.matrix
def test_a_loop_keeps_its_losses_its_metrics_and_its_average_through_kills(runs: Runs) -> None:
    _, spec = runs.spec("loop", max_steps=STEPS, standby=2)
    spec = dataclasses.replace(spec, batch=Batch(global_size=12, micro_size=3, seed=5))
    calm = {
        r.step: (r.loss, dict(r.metrics)) for r in train_alone(LoopTask(loops.averaged), spec) if r.metrics
    }
    print(f"seed {FAULTS.seed}: {[str(f) for f in FAULTS.faults]}")
    chaos = Chaos(runs.cluster, FAULTS, print)
    task = LoopTask(partial(loops.averaged, seconds=0.05))
    rough = fit(task, spec, address=None, local_nodes=0, quiet=False, chaos=chaos)
    assert rough.outcome == "finished"
    assert [e.step for e in rough.ledger.kept] == list(range(1, STEPS + 1))
    reported = history(rough.records)
    assert len([change for change in reported if not change.graceful]) == 3, "each kill is there"
    assert sum(change.lost for change in reported) == len(rough.ledger.superseded)
    assert rough.ledger.losses == pytest.approx({step: loss for step, (loss, _) in calm.items()}, rel=1e-4)
    for entry in rough.ledger.kept[:-1]:
        said = {name: value for name, value in entry.metrics if name != "norm"}
        assert said == pytest.approx({k: v for k, v in calm[entry.step][1].items() if k != "norm"}, rel=1e-4)


@pytest.mark.matrix
def test_a_loop_that_returns_early_finishes_its_run_and_does_not_begin_again(runs: Runs) -> None:
    _, spec = runs.spec("early", max_steps=STEPS)
    spec = dataclasses.replace(spec, batch=Batch(global_size=12, micro_size=3, seed=5))
    for _ in range(2):
        result = fit(LoopTask(loops.stops), spec, address=None, local_nodes=0, quiet=False)
        assert result.outcome == "finished"
        assert [e.step for e in result.ledger.kept] == [1, 2, 3, 4]
        assert result.checkpoint is not None


def test_a_run_is_over_when_its_end_hook_and_its_files_are_also_where_a_rank_dies_in_it(
    runs: Runs, tmp_path: Path
) -> None:
    _, spec = runs.spec("end", max_steps=4)
    spec = dataclasses.replace(spec, batch=Batch(global_size=12, micro_size=3, seed=5))
    mark, files = tmp_path / "died", 600
    task = LoopTask(partial(loops.dies_at_the_end, mark=mark, files=files))
    rough = fit(task, spec, address=None, local_nodes=0, quiet=False)
    assert mark.exists()
    assert rough.outcome == "finished"
    assert rough.ledger.superseded == ()
    assert [len(left) for left in rough.artifacts.values()] == [files]
    assert not any("for the last checkpoint" in record.reason for record in rough.records), "asked for once"


def test_who_is_between_two_steps_when_another_dies_keeps_its_state_however_long_that_takes(
    runs: Runs,
) -> None:
    _, spec = runs.spec("busy", max_steps=6, timing=dataclasses.replace(WHOLE, settle_s=2.0))
    spec = dataclasses.replace(spec, batch=Batch(global_size=12, micro_size=3, seed=5))
    faults = FaultSchedule(faults=(KillRank(when=Moment(step=4, phase="backward"), rank=0),), seed=0)
    task = LoopTask(partial(loops.dawdles, seconds=5.0))
    chaos = Chaos(runs.cluster, faults, print)
    rough = fit(task, spec, address=None, local_nodes=0, quiet=False, chaos=chaos)
    assert rough.outcome == "finished"
    lost = [r.event.worker for r in rough.records if isinstance(r.event, WorkerLost)]
    assert len(lost) == 1, lost
    assert rough.ledger.superseded == ()
    assert not any("no final report" in record.reason for record in rough.records)


def test_what_a_loop_does_between_its_steps_may_take_longer_than_a_step_and_is_no_hang(runs: Runs) -> None:
    _, spec = runs.spec("dawdles", max_steps=5, timing=dataclasses.replace(WHOLE, stall_s=1.0))
    spec = dataclasses.replace(spec, batch=Batch(global_size=12, micro_size=3, seed=5))
    calm = fit(LoopTask(partial(loops.dawdles, seconds=6.0)), spec, address=None, local_nodes=0, quiet=False)
    assert calm.outcome == "finished"
    assert sum(record.formed is not None for record in calm.records) == 1, "nobody was taken for hung"
