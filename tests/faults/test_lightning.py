"""The job that is a LightningModule on a real cluster: a worker is killed, and it equals Lightning's run."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_train.checkpoint.reader import open_checkpoint
from elastic_train.cluster.driver.launch import fit
from elastic_train.cluster.faults.cluster_faults import Chaos
from elastic_train.control.fault_schedule import FaultSchedule, KillRank, Moment
from tests.faults.conftest import Runs

L = pytest.importorskip("lightning", reason="the extra lightning is not installed")
pytest.importorskip("sklearn", reason="scikit-learn ships the images of this job")
pytestmark = [pytest.mark.ring4, pytest.mark.timeout(400), pytest.mark.filterwarnings("default")]
NODES, CPUS = 3, 2
EPOCHS, SIZE = 2, 96
KILLED = FaultSchedule(faults=(KillRank(when=Moment(step=7, phase="backward"), rank=1),), seed=0)


def lightnings_own(batch: Any) -> tuple[list[float], Any, Any]:
    """Losses of the job's module under Lightning's Trainer, micro-batch by micro-batch in the same order."""
    from jobs.lightning_vae import VAE, Digits
    from tests.tasks.lightning_modules import InOrder, SameNoise

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    L.seed_everything(0, verbose=False)
    module, data = VAE(), Digits(batch.micro_size)
    data.setup("fit")
    loader = torch.utils.data.DataLoader(
        data.train, batch_size=batch.micro_size, sampler=InOrder(batch, len(data.train))
    )
    noise = SameNoise(batch.micro_batches, seed=batch.seed)
    trainer = L.Trainer(
        max_epochs=EPOCHS, gradient_clip_val=1.0, accumulate_grad_batches=batch.micro_batches, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, accelerator="cpu",
        callbacks=[noise],
    )  # fmt: skip
    trainer.fit(module, loader, data.val_dataloader())
    return noise.steps(), trainer, module


def test_the_job_with_a_killed_worker_equals_lightnings_own_run_and_opens_there(
    runs: Runs, tmp_path: Path
) -> None:
    import elastic_train as et
    from jobs import lightning_vae

    made = lightning_vae.trainer(
        batch_size=SIZE,
        micro_size=16,
        max_epochs=EPOCHS,
        storage=str(runs.storage),
        name="vae",
        workers="2:3",
    )
    _, usual = runs.spec("vae", standby=1)
    spec = dataclasses.replace(made.spec, timing=usual.timing, standby=1, max_failures=5)
    rough = fit(
        made.task,
        spec,
        address=None,
        local_nodes=0,
        quiet=False,
        chaos=Chaos(runs.cluster, KILLED, print),
    )
    assert rough.outcome == "finished"
    assert rough.ledger.superseded == ()
    theirs, trainer, trained = lightnings_own(spec.batch)
    assert list(rough.ledger.losses) == [*range(1, len(theirs) + 1)]
    assert list(rough.ledger.losses.values()) == pytest.approx(theirs, rel=1e-6)
    measured = [dict(e.metrics)["val_error"] for e in rough.ledger.kept if "val_error" in dict(e.metrics)]
    assert len(measured) == EPOCHS
    assert measured[-1] == pytest.approx(float(trainer.callback_metrics["val_error"]), rel=1e-5)

    file = tmp_path / "vae.ckpt"
    et.lightning.save_checkpoint(rough, file, lightning_vae.VAE())
    opened = lightning_vae.VAE.load_from_checkpoint(file)
    assert opened.hparams["width"] == 64
    for name, value in trained.state_dict().items():
        torch.testing.assert_close(opened.state_dict()[name], value, rtol=1e-4, atol=1e-6)
    found = open_checkpoint(str(file))
    assert found.document["step"] == len(theirs)
    assert any(state == "exp_avg" for _, state in found.tensors)
