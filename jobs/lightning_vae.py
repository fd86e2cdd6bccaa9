"""Compress handwritten digits with a variational autoencoder: a LightningModule, trained by et.lightning.

python jobs/lightning_vae.py --max-epochs 20    (needs the extra lightning, and scikit-learn)
"""

from __future__ import annotations

import lightning as L
import torch
from ray.train import RunConfig, ScalingConfig
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split

import elastic_train as et


class Digits(L.LightningDataModule):
    """Images [64] in 0 .. 1."""

    def __init__(self, batch_size: int):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        images = torch.tensor(load_digits(return_X_y=True)[0] / 16, dtype=torch.float32)
        held_out = torch.Generator().manual_seed(0)
        self.train, self.held_out = random_split(TensorDataset(images), [1536, 261], held_out)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.held_out, batch_size=self.batch_size)


class VAE(L.LightningModule):
    """Kingma and Welling, ICLR 2014."""

    def __init__(self, width: int = 64, latent: int = 8, lr: float = 2e-3, weight: float = 0.05):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.mean, self.spread = nn.Linear(width, latent), nn.Linear(width, latent)
        self.decoder = nn.Sequential(nn.Linear(latent, width), nn.ReLU(), nn.Linear(width, 64), nn.Sigmoid())

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.encoder(images)
        mean, spread = self.mean(hidden), self.spread(hidden)
        noise = torch.randn_like(mean) if self.training else torch.zeros_like(mean)
        return self.decoder(mean + noise * torch.exp(spread / 2)), mean, spread

    def step(self, images: Tensor) -> tuple[Tensor, Tensor]:
        rebuilt, mean, spread = self(images)
        divergence = -0.5 * (1 + spread - mean**2 - spread.exp()).sum(-1).mean()
        return F.mse_loss(rebuilt, images), divergence / images.shape[-1]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        error, divergence = self.step(batch[0])
        self.log_dict({"error": error, "divergence": divergence}, prog_bar=True)
        return error + self.hparams["weight"] * divergence

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        error, _ = self.step(batch[0])
        self.log("val_error", error)

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])
        slower = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=2)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": slower, "monitor": "val_error"}}


def trainer(
    *,
    width: int = 64,
    batch_size: int = 48,
    micro_size: int = 8,
    max_epochs: int = 20,
    lr: float = 2e-3,
    seed: int = 0,
    workers: str = "1:3",
    storage: str = "./runs",
    name: str = "lightning_vae",
) -> et.ElasticTrainer:
    """Compress handwritten digits, in a LightningModule."""
    least, _, most = workers.partition(":")
    L.seed_everything(seed, verbose=False)
    return et.lightning.trainer(
        VAE(width=width, lr=lr),
        datamodule=Digits(batch_size),
        max_epochs=max_epochs,
        gradient_clip_val=1.0,
        seed=seed,
        micro_size=micro_size,
        scaling_config=ScalingConfig(num_workers=(int(least), int(most or least))),
        run_config=RunConfig(name=name, storage_path=storage),
    )


if __name__ == "__main__":
    et.main(trainer)
