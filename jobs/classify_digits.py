"""Classify handwritten digits with a small convolutional network: batch statistics, dropout, augmentation.

python jobs/classify_digits.py --max-steps 200        (needs scikit-learn, which ships the images)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from ray.train import RunConfig, ScalingConfig
from sklearn.datasets import load_digits
from torch import Tensor, nn

import elastic_train as et

HELD_OUT = 297  # of 1797 images, evaluated and never trained


class Digits:
    """Images [1, 8, 8] in 0 .. 1 with their labels. In training each is shifted and noised at random.

    Every generator is seeded by (seed, epoch, image), so that it doesn't matter who loads an image.
    """

    def __init__(self, *, train: bool):
        images, labels = load_digits(return_X_y=True)
        part = slice(None, -HELD_OUT) if train else slice(-HELD_OUT, None)
        self.images = torch.tensor(images[part] / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
        self.labels = torch.tensor(labels[part], dtype=torch.int64)
        self.train = train

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image, label = self.images[index], self.labels[index]
        if self.train:
            down, right = torch.randint(-1, 2, (2,)).tolist()
            image = torch.roll(image, (down, right), dims=(1, 2)) + 0.05 * torch.randn(image.shape)
        return image, label


class Network(nn.Sequential):
    """Images [batch, 1, 8, 8] to logits [batch, 10]."""

    def __init__(self, width: int, dropout: float):
        super().__init__(
            nn.Conv2d(1, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(8 * width, 10),
        )


@dataclass(frozen=True, kw_only=True)
class Classify(et.Task):
    """Ten classes, cross entropy per image."""

    width: int
    dropout: float
    lr: float

    def model(self) -> nn.Module:
        return Network(self.width, self.dropout)

    def optimizer(self, named_params: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return torch.optim.AdamW([parameter for _, parameter in named_params], lr=self.lr)

    def dataset(self) -> Digits:
        return Digits(train=True)

    def loss(self, output: Tensor, micro_batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        return F.cross_entropy(output, micro_batch[1], reduction="sum"), len(output)

    def evaluation(self) -> et.Evaluation:
        return et.Evaluation(dataset=Digits(train=False), metric=accuracy, every=50)


def accuracy(output: Tensor, micro_batch: tuple[Tensor, Tensor]) -> dict[str, tuple[Tensor, int]]:
    """Images whose most likely class is theirs."""
    return {"accuracy": ((output.argmax(-1) == micro_batch[1]).sum(), len(output))}


def trainer(
    *,
    width: int = 16,
    dropout: float = 0.2,
    global_size: int = 48,
    micro_size: int = 8,
    max_steps: int = 200,
    lr: float = 3e-3,
    seed: int = 0,
    workers: str = "1:3",
    storage: str = "./runs",
    name: str = "classify_digits",
) -> et.ElasticTrainer:
    """Classify handwritten digits with a small convolutional network."""
    least, _, most = workers.partition(":")
    return et.ElasticTrainer(
        Classify(width=width, dropout=dropout, lr=lr),
        batch=et.Batch(global_size=global_size, micro_size=micro_size, seed=seed),
        max_steps=max_steps,
        scaling_config=ScalingConfig(num_workers=(int(least), int(most or least))),
        run_config=RunConfig(name=name, storage_path=storage),
    )


if __name__ == "__main__":
    et.main(trainer)
