"""Workers on the rehearsal device, as on GPUs: groups form, are broken in a collective, and form again.

A device that fails takes its worker with it, and nobody else.
"""

from __future__ import annotations

import dataclasses
import itertools
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from elastic_train.checkpoint.run_directory import RunDirectory
from elastic_train.cluster.driver.launch import fit, prepare_local_environment
from elastic_train.cluster.faults.cluster_faults import Chaos
from elastic_train.cluster.local_cluster import LocalCluster
from elastic_train.config import Checkpoints
from elastic_train.control.fault_schedule import FaultSchedule, KillRank, Moment
from elastic_train.storage.fsspec_store import child_url, open_store
from elastic_train.testing.rehearsal import communicator
from elastic_train.testing.rehearsal import device as rehearsal
from elastic_train.testing.rehearsal.build import load_library, missing
from elastic_train.testing.single_process_run import train_alone
from jobs.pretrain_lm import Pretrain
from tests.faults.conftest import Runs, assert_same_training

pytestmark = [
    pytest.mark.ring4,
    pytest.mark.matrix,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(missing()), reason=f"no rehearsal device: {missing()}"),
]
STEPS = 16
MEASURED = itertools.count()  # micro-batches, in this process
STORM = FaultSchedule(
    faults=(
        KillRank(when=Moment(step=4, phase="reduce"), rank=1),
        KillRank(when=Moment(step=9, phase="backward"), rank=0),
    ),
    seed=0,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OnDevice(Pretrain):
    """Where it is read in a process that Ray gave a GPU, that GPU is there.

    Of the processes that come to their 15th micro-batch the first takes the file `fails`: its device fails.
    """

    fails: str

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if ray.get_gpu_ids():
            rehearsal.load(devices=1)
            communicator.register()

    def metrics(self, output: Any, micro_batch: Any) -> dict[str, tuple[float, float]]:
        if next(MEASURED) == 15:
            with suppress(FileNotFoundError):
                Path(self.fails).unlink()
                load_library().fail(torch.accelerator.current_device_index())
        return {"on_device": (float(output.device.type == rehearsal.NAME), 1.0)}


def test_workers_with_a_device_lose_no_committed_step_to_deaths_in_a_collective(tmp_path: Path) -> None:
    prepare_local_environment()
    load_library()  # compiled before workers wait for it
    with LocalCluster(2, cpus=2, gpus=2) as cluster:
        runs = Runs(cluster, tmp_path)
        plain, spec = runs.spec(
            "device",
            workers="2:3",
            standby=0,
            max_steps=STEPS,
            gpus_per_worker=1.0,
            checkpoints=Checkpoints(every=5, keep=2, peers="auto"),
        )
        fails = tmp_path / "fails"
        fails.touch()
        task = OnDevice(fails=str(fails), **vars(plain))
        rough = fit(task, spec, address=None, local_nodes=0, quiet=False, chaos=Chaos(cluster, STORM, print))
    alone = train_alone(plain, dataclasses.replace(spec, name="alone", gpus_per_worker=0.0))
    assert_same_training(rough, {r.step: (r.ids_digest, r.loss) for r in alone}, relative=1e-4)
    sources = [r.formed.source for r in rough.records if r.formed is not None]
    assert sources[0] == "fresh"
    assert sources.count("live") >= 3, "survivors went on from what their devices held"
    (failed,) = [r for r in rough.records if "DeviceFailed" in str(r)][:1]
    assert "an error of a rehearsal device that stays" in str(failed)
    assert rough.ledger.superseded == ()
    assert {dict(e.metrics)["on_device"] for e in rough.ledger.kept} == {1.0}
    newest = RunDirectory(open_store(child_url(str(tmp_path), "device"))).newest()
    assert newest is not None
    assert newest.step == STEPS
