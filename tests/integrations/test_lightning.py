"""LightningModules under `et.lightning`: equal to Lightning's own Trainer on one process, also if killed."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import elastic_train as et
from elastic_train.testing.gang import From, Gang
from elastic_train.testing.gloo_pool import GlooPool
from elastic_train.testing.single_process_run import train_alone
from elastic_train.train.step.training_loop import StepReport

pytest.importorskip("lightning", reason="the extra lightning is not installed")
from tests.tasks.lightning_modules import GAN, SEED, VAE, held_out, lightnings_own, loader

pytestmark = [pytest.mark.ring2, pytest.mark.filterwarnings("default")]
EPOCHS = 3


def trainer(module: Any, *, batch_size: int = 4, accumulate: int = 3, **options: Any) -> Any:
    return et.lightning.trainer(
        module,
        loader(batch_size),
        held_out(batch_size),
        max_epochs=EPOCHS,
        accumulate_grad_batches=accumulate,
        seed=SEED,
        **options,
    )


def by_step(reports: list[StepReport]) -> tuple[list[float], list[dict[str, float]], list[float]]:
    """Losses, metrics and rates: a later report of a step adds to it."""
    losses, metrics, rates = dict[int, float](), dict[int, dict[str, float]](), dict[int, float]()
    for report in reports:
        losses[report.step] = report.loss
        rates.setdefault(report.step, report.rates[0])
        metrics.setdefault(report.step, {}).update(report.metrics)
    return list(losses.values()), list(metrics.values()), list(rates.values())


@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        ("none", {"gradient_clip_val": 0.1}),
        ("none", {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
        ("plateau", {}),
        ("steps", {"check_val_every_n_epoch": 2}),
        ("cycle", {"val_check_interval": 0.5}),
        ("epochs", {"check_val_every_n_epoch": None, "val_check_interval": 9}),
    ],
)
def test_a_fit_equals_lightnings_own(schedule: str, options: dict[str, Any]) -> None:
    torch.manual_seed(3)
    module = VAE(schedule=schedule)
    ours = trainer(module, **options)
    losses, metrics, rates = by_step(train_alone(ours.task, ours.spec))
    _, noise, theirs = lightnings_own(module, ours.spec.batch, max_epochs=EPOCHS, **options)
    np.testing.assert_allclose(losses, noise.steps(), rtol=1e-6)
    np.testing.assert_allclose(rates, noise.rates, rtol=1e-12)
    measured = [step["val_loss"] for step in metrics if "val_loss" in step]
    np.testing.assert_allclose(measured[-1], float(theirs.callback_metrics["val_loss"]), rtol=1e-6)
    np.testing.assert_allclose(
        metrics[-1]["train_loss_epoch"], float(theirs.callback_metrics["train_loss_epoch"]), rtol=1e-6
    )
    assert metrics[0].keys() >= {"rebuilt", "divergence", "train_loss_step"}


@pytest.mark.parametrize("mesh", [(2, 1), (1, 2)], ids=["replicated", "sharded"])
def test_a_fit_goes_on_equal_after_a_kill(pool: GlooPool, mesh: tuple[int, int]) -> None:
    torch.manual_seed(3)
    module = VAE(schedule="plateau")
    ours = trainer(module, gradient_clip_val=0.1)
    _, noise, theirs = lightnings_own(module, ours.spec.batch, max_epochs=EPOCHS, gradient_clip_val=0.1)
    spec = dataclasses.replace(ours.spec, max_workers=4)
    gang = Gang(pool, ours.task, spec)
    gang.form(gang.plan(*mesh), [0, 1])
    reports = gang.pause_at(4)  # the first epoch's end, before its evaluation
    gang.form(gang.plan(2, 1), [0, 2], gang.held())
    reports += broken_off(gang, 2, "backward", 7)
    gang.form(gang.plan(1, 3), [0, 1, 3], From(generation=gang.generation, step=6, holders=(0,)))
    reports += gang.run()
    losses, metrics, _ = by_step(reports)
    np.testing.assert_allclose(losses, noise.steps(), rtol=1e-6)
    np.testing.assert_allclose(metrics[-1]["val_loss"], float(theirs.callback_metrics["val_loss"]), rtol=1e-6)
    assert [n for n, step in enumerate(metrics, 1) if "val_loss" in step] == [4, 8, 12]


def broken_off(gang: Gang, process: int, phase: str, step: int) -> list[StepReport]:
    """Kill a process at a phase, break the group, and replace the process; what the others reported."""
    running = gang.begin_until(process, phase, step)
    gang.pool.kill(process)
    others = [p for p in gang.processes if p != process]
    gang.abort(others)
    outcomes = running.results(ranks=others)
    assert all(end is None and error.startswith("GroupBroken") for end, error, _ in outcomes), outcomes
    gang.pool.restart(process)
    return outcomes[0][2]


def test_manual_optimization_equals_lightnings_own_and_divides_a_batch(pool: GlooPool) -> None:
    torch.manual_seed(3)
    module = GAN()
    ours = trainer(module, batch_size=12, accumulate=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, noise, _ = lightnings_own(module, ours.spec.batch, max_epochs=EPOCHS)
    reports = train_alone(ours.task, ours.spec)
    _, metrics, rates = by_step(reports)
    for name in ("fooled", "judged"):
        np.testing.assert_allclose([m[name] for m in metrics], [m[name] for m in noise.logged], rtol=1e-6)
    np.testing.assert_allclose(rates, noise.rates, rtol=1e-12)

    divided = trainer(module, batch_size=12, accumulate=1, micro_size=4)
    _, alone, _ = by_step(train_alone(divided.task, divided.spec))
    gang = Gang(pool, divided.task, dataclasses.replace(divided.spec, max_workers=4))
    gang.form(gang.plan(2, 1), [0, 1])
    found = gang.pause_at(2)
    gang.form(gang.plan(3, 1), [0, 2, 3], gang.held())
    found += broken_off(gang, 3, "backward", 5)
    gang.form(gang.plan(2, 1), [0, 2], From(generation=gang.generation, step=4, holders=(0, 2)))
    _, divided_metrics, _ = by_step(found + gang.run())
    for name in ("fooled", "judged"):
        np.testing.assert_allclose([m[name] for m in divided_metrics], [m[name] for m in alone], rtol=1e-5)


class Stops(VAE):
    """Its validation gets no better."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", 1.0 + self.current_epoch)

    def on_train_end(self) -> None:
        self.print("the end of", self.current_epoch)


def test_early_stopping_ends_where_lightning_does(capsys: pytest.CaptureFixture[str]) -> None:
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

    module = Stops()
    ours = et.lightning.trainer(
        module,
        loader(4),
        held_out(4),
        max_epochs=9,
        accumulate_grad_batches=3,
        seed=SEED,
        callbacks=[EarlyStopping("val_loss", patience=2), ModelCheckpoint(monitor="val_loss", save_top_k=2)],
    )
    assert ours.spec.checkpoints == et.Checkpoints(every=4, best="val_loss", keep_best=2)
    losses, _, _ = by_step(train_alone(ours.task, ours.spec))
    assert "the end of 2" in capsys.readouterr().out
    _, noise, _ = lightnings_own(
        module, ours.spec.batch, max_epochs=9, callbacks=(EarlyStopping("val_loss", patience=2),)
    )
    assert len(losses) == 12
    np.testing.assert_allclose(losses, noise.steps(), rtol=1e-6)


class Collects(VAE):
    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Any] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.outputs.append(batch_idx)

    def on_validation_epoch_end(self) -> None:
        self.log("batches", len(self.outputs))


class CollectsInTraining(VAE):
    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        found = super().training_step(batch, batch_idx)
        self.outputs.append(float(found["loss"].detach()))
        return found

    def on_train_epoch_end(self) -> None:
        self.log("mean", sum(self.outputs) / len(self.outputs))


class AsksTheTrainer(VAE):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.trainer.strategy


class LeavesBatchesOut(VAE):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None


class StepsTwice(GAN):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        draws, _ = self.optimizers()  # type: ignore[misc]
        for _ in range(2):
            draws.zero_grad()
            self.manual_backward(self.generator(torch.randn(2, 4)).mean())
            draws.step()


class KeepsGradients(GAN):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.generator(torch.randn(2, 4)).mean())


class UsesOldGradients(GAN):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        draws, judges = self.optimizers()  # type: ignore[misc]
        self.manual_backward(self.critic(self.generator(torch.randn(2, 4))).mean())
        draws.step()
        self.manual_backward(self.critic(batch[0]).mean())
        judges.step()


@pytest.mark.parametrize(
    ("module", "named"),
    [
        (Collects, "on_validation_epoch_end"),
        (CollectsInTraining, "outputs"),
        (AsksTheTrainer, "self.trainer.strategy"),
        (LeavesBatchesOut, "training_step"),
        (StepsTwice, "step.update"),
        (KeepsGradients, "training_step"),
        (UsesOldGradients, "zero_grad"),
    ],
)
def test_what_depends_on_the_plan_is_refused_where_it_shows(module: type, named: str) -> None:
    ours = et.lightning.trainer(module(), loader(12), held_out(12), max_epochs=1)
    with pytest.raises(Exception, match=named):
        train_alone(ours.task, ours.spec)


def test_a_ckpt_of_lightnings_goes_on_with_its_losses_and_rates(pool: GlooPool, tmp_path: Path) -> None:
    from elastic_train.checkpoint.begin import begin
    from elastic_train.storage.fsspec_store import open_store
    from tests.train.test_resume_from_libraries import restored

    torch.manual_seed(3)
    module = VAE(schedule="steps")
    batch = trainer(module).spec.batch
    _, noise, theirs = lightnings_own(module, batch, max_epochs=EPOCHS)
    _, _, first = lightnings_own(module, batch, max_epochs=1)
    first.save_checkpoint(tmp_path / "last.ckpt")
    ours = trainer(module, ckpt_path=tmp_path / "last.ckpt")
    run = str(tmp_path / "run")
    begin(open_store(run), ours.resume_from, holder="test")
    gang = Gang(pool, ours.task, dataclasses.replace(ours.spec, max_workers=4))
    gang.join(gang.plan(2, 1), [0, 1])
    pool.run(restored, run, ranks=gang.processes)
    losses, metrics, rates = by_step(gang.run())
    np.testing.assert_allclose(losses, noise.steps()[4:], rtol=1e-6)
    np.testing.assert_allclose(rates, noise.rates[4:], rtol=1e-9)
    assert metrics[-1]["val_loss"] == pytest.approx(float(theirs.callback_metrics["val_loss"]), rel=1e-6)
