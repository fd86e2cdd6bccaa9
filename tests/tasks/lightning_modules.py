"""LightningModules for the processes of a pool, and Lightning's own run of them in the same order."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Sampler, TensorDataset

import elastic_train as et
from elastic_train.data.order import SampleOrder
from elastic_train.train.model.rng import Randomness

SAMPLES, HELD_OUT, SEED = 48, 10, 5


def images(samples: int = SAMPLES, seed: int = 1) -> TensorDataset:
    return TensorDataset(torch.rand(samples, 16, generator=torch.Generator().manual_seed(seed)))


def loader(batch_size: int, samples: int = SAMPLES) -> DataLoader[Any]:
    return DataLoader(images(samples), batch_size=batch_size, shuffle=True)


def held_out(batch_size: int) -> DataLoader[Any]:
    return DataLoader(images(HELD_OUT, 2), batch_size=batch_size)


class VAE(L.LightningModule):
    """Of the usual shape. `schedule` names one of the ways in which configure_optimizers says it."""

    def __init__(self, width: int = 8, lr: float = 1e-2, schedule: str = "none") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(16, width), nn.ReLU())
        self.mean, self.spread = nn.Linear(width, 4), nn.Linear(width, 4)
        self.decoder = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 16))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        hidden = self.encoder(x)
        mean, spread = self.mean(hidden), self.spread(hidden)
        noise = torch.randn_like(mean) if self.training else torch.zeros_like(mean)
        return self.decoder(mean + noise * torch.exp(0.5 * spread)), mean, spread

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, torch.Tensor]:
        drawn, mean, spread = self(batch[0])
        rebuilt = F.mse_loss(drawn, batch[0])
        divergence = -0.5 * (1 + spread - mean**2 - spread.exp()).mean()
        self.log_dict({"rebuilt": rebuilt, "divergence": divergence})
        loss = rebuilt + 0.1 * divergence
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True, sync_dist=True)
        return {"loss": loss}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.mse_loss(self(batch[0])[0], batch[0]))

    def configure_optimizers(self) -> Any:
        named: Any = self.hparams
        optimizer = torch.optim.AdamW(self.parameters(), lr=named["lr"])
        rates = torch.optim.lr_scheduler
        match named["schedule"]:
            case "plateau":
                plateau = rates.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
                return {"optimizer": optimizer, "lr_scheduler": plateau, "monitor": "val_loss"}
            case "steps":
                each = rates.StepLR(optimizer, 1, gamma=0.9)
                return {
                    "optimizer": optimizer,
                    "lr_scheduler": {"scheduler": each, "interval": "step", "frequency": 6},
                }
            case "cycle":
                total = self.trainer.estimated_stepping_batches
                each = rates.OneCycleLR(optimizer, max_lr=0.05, total_steps=int(total))
                return [optimizer], [{"scheduler": each, "interval": "step"}]
            case "epochs":
                return [optimizer], [rates.ExponentialLR(optimizer, 0.5)]
            case _:
                return optimizer


class GAN(L.LightningModule):
    """Manual optimization of two networks, as in Lightning's own examples."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 16))
        self.critic = nn.Sequential(nn.Linear(16, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        draws, judges = self.optimizers()  # type: ignore[misc]
        real = batch[0]
        noise = torch.randn(len(real), 4)
        self.toggle_optimizer(draws)
        fooled = F.softplus(-self.critic(self.generator(noise))).mean()
        self.log("fooled", fooled)
        self.manual_backward(fooled)
        draws.step()
        draws.zero_grad()
        self.untoggle_optimizer(draws)

        self.toggle_optimizer(judges)
        fake = self.generator(noise).detach()
        judged = F.softplus(-self.critic(real)).mean() + F.softplus(self.critic(fake)).mean()
        self.log("judged", judged)
        self.manual_backward(judged)
        self.clip_gradients(judges, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        judges.step()
        judges.zero_grad()
        self.untoggle_optimizer(judges)
        self.lr_schedulers().step()  # type: ignore[union-attr]

    def configure_optimizers(self) -> Any:
        draws = torch.optim.Adam(self.generator.parameters(), lr=1e-2)
        judges = torch.optim.Adam(self.critic.parameters(), lr=1e-2)
        return [draws, judges], [torch.optim.lr_scheduler.ExponentialLR(draws, 0.9)]


class InOrder(Sampler[int]):
    """The samples in the order of a run, epoch after epoch."""

    def __init__(self, batch: et.Batch, samples: int) -> None:
        self.order, self.epoch = SampleOrder(samples, batch), -1

    def __len__(self) -> int:
        return self.order.length

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        first = self.epoch * self.order.steps_per_epoch + 1
        steps = range(first, first + self.order.steps_per_epoch)
        return iter([i for step in steps for micro in self.order.micro_batches(step) for i in micro.ids])


class SameNoise(L.Callback):
    """Seeds each batch as a run does, and notes what became of it."""

    def __init__(self, accumulate: int, seed: int = SEED) -> None:
        self.accumulate, self.batches, self.seed = accumulate, 0, seed
        self.losses: list[float] = []
        self.rates: list[float] = []
        self.logged: list[dict[str, float]] = []
        self._within, self._random = ExitStack(), None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._random is None:
            named = nn.Module()
            named.lightning = nn.Module()
            named.lightning.module = pl_module
            self._random = Randomness(named, seed=self.seed)
        step, index = divmod(self.batches, self.accumulate)
        if index == 0:
            self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])
        self._within.enter_context(self._random.micro_batch(step + 1, index))

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._within.close()
        self.batches += 1
        if isinstance(outputs, dict) and "loss" in outputs:
            self.losses.append(float(outputs["loss"]))
        self.logged.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    def steps(self) -> list[float]:
        """Losses by step: Lightning divides those of a batch by how many make one."""
        of = self.accumulate
        return [sum(self.losses[n : n + of]) for n in range(0, len(self.losses), of)]


def lightnings_own(
    module: L.LightningModule,
    batch: et.Batch,
    *,
    callbacks: tuple[L.Callback, ...] = (),
    data: Callable[[DataLoader[Any]], dict[str, Any]] | None = None,
    **options: Any,
) -> tuple[L.LightningModule, SameNoise, L.Trainer]:
    """A copy of the module, trained by Lightning's Trainer in this process. `data` makes what its `fit` gets
    of a data loader."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    noise = SameNoise(batch.micro_batches)
    trained = copy.deepcopy(module)
    of = {"accumulate_grad_batches": batch.micro_batches} if module.automatic_optimization else {}
    trainer = L.Trainer(
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        accelerator="cpu", callbacks=[noise, *callbacks], **of, **options,
    )  # fmt: skip
    in_order = DataLoader(images(), batch_size=batch.micro_size, sampler=InOrder(batch, SAMPLES))
    given = {"train_dataloaders": in_order, "val_dataloaders": held_out(batch.micro_size)}
    trainer.fit(trained, **(data(in_order) if data else given))
    return trained, noise, trainer
