"""Search the learning rate and the width of a classifier of handwritten digits; bad trials are stopped early.

python jobs/tune_sweep.py --samples 6        (needs scikit-learn, which ships the images)
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import ray
import torch
from ray import tune
from ray.train import RunConfig, ScalingConfig
from ray.tune.schedulers import ASHAScheduler
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import elastic_train as et


class Digits(et.Task):
    """A network of one hidden layer."""

    def __init__(self, width: int, lr: float):
        self.width, self.lr = width, lr

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(64, self.width), nn.ReLU(), nn.Linear(self.width, 10))

    def optimizer(self, named_params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for _, p in named_params], lr=self.lr, momentum=0.9)

    def dataset(self) -> TensorDataset:
        images, labels = load_digits(return_X_y=True)
        return TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))

    def loss(self, output: Tensor, micro_batch: list[Tensor]) -> tuple[Tensor, int]:
        return cross_entropy(output, micro_batch[1], reduction="sum"), len(micro_batch[1])


def trainer(config: dict[str, Any]) -> et.ElasticTrainer:
    """Of one trial."""
    return et.ElasticTrainer(
        Digits(config["width"], config["lr"]),
        batch=et.Batch(global_size=48, micro_size=16, seed=0),
        max_steps=config["max_steps"],
        scaling_config=ScalingConfig(num_workers=(1, 2)),
        run_config=RunConfig(name="digits", storage_path=config["storage"]),
    )


SPACE = {"lr": tune.loguniform(1e-4, 1.0), "width": tune.choice([16, 64])}


def tuner(
    *,
    samples: int = 6,
    max_steps: int = 60,
    first: int = 10,
    at_once: int = 2,
    storage: str = "runs",
    space: dict[str, Any] = SPACE,
) -> tune.Tuner:
    """Each step of a trial is a result; after the `first`, twice as many, and so on, the worse half stops."""
    return tune.Tuner(
        et.tune.trainable(trainer),
        param_space={**space, "max_steps": max_steps, "storage": storage},
        tune_config=tune.TuneConfig(
            metric="loss",
            mode="min",
            num_samples=samples,
            max_concurrent_trials=at_once,
            scheduler=ASHAScheduler(
                time_attr="step", max_t=max_steps, grace_period=first, reduction_factor=2
            ),
        ),
        run_config=tune.RunConfig(
            name="search",
            storage_path=str(Path(storage).absolute()),
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=True),
        ),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=6)
    parser.add_argument("--max-steps", type=int, default=60)
    given = parser.parse_args()
    ray.init()
    best = tuner(samples=given.samples, max_steps=given.max_steps).fit().get_best_result()
    print(best.config, best.metrics["loss"], et.tune.checkpoint_url(best))
