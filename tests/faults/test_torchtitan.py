"""The job that is torchtitan's debug Llama on a real cluster: a worker is killed, and it equals what
torchtitan's own parts compute.
"""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path

import pytest

import elastic_train as et
from elastic_train.cluster.driver.launch import fit
from elastic_train.cluster.faults.cluster_faults import Chaos
from elastic_train.control.fault_schedule import FaultSchedule, KillRank, Moment
from tests.faults.conftest import Runs

pytest.importorskip("torchtitan", reason="the extra torchtitan is not installed")
with warnings.catch_warnings():  # of torch's own modules, which torchtitan imports
    warnings.simplefilter("ignore")
    from jobs import titan_llama
    from tests.tasks.titan import Titan

pytestmark = [
    pytest.mark.ring4,
    pytest.mark.matrix,
    pytest.mark.timeout(1000),
    pytest.mark.filterwarnings("default"),
]
NODES, CPUS = 3, 1
STEPS = 12
KILLED = FaultSchedule(faults=(KillRank(when=Moment(step=5, phase="backward"), rank=1),), seed=0)


def test_the_job_with_a_killed_worker_equals_torchtitans_own_run_and_torchtitan_opens_it(
    runs: Runs, tmp_path: Path
) -> None:
    made = titan_llama.trainer(
        layers=2, seq_len=16, max_steps=STEPS, storage=str(runs.storage), name="titan", workers="2:3"
    )
    _, usual = runs.spec("titan")
    spec = dataclasses.replace(made.spec, timing=usual.timing, standby=1, max_failures=5)
    rough = fit(
        made.task, spec, address=None, local_nodes=0, quiet=False, chaos=Chaos(runs.cluster, KILLED, print)
    )
    assert rough.outcome == "finished"
    assert len({entry.generation for entry in rough.ledger.kept}) > 1
    assert rough.ledger.superseded == ()
    theirs = Titan(made.task.prepared)
    expected = theirs.train(made.task.dataset(), spec.batch, 1, STEPS)
    assert list(rough.ledger.losses.values()) == pytest.approx(expected, rel=1e-5)

    et.torchtitan.save_checkpoint(rough, tmp_path / "back", made.task.prepared)
    assert Titan(made.task.prepared).load(tmp_path / "back") == STEPS
