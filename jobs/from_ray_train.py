"""A Ray Train script made elastic: what changed is in docs/from-other-frameworks.md.

python jobs/from_ray_train.py --max-steps 200        (needs scikit-learn, which ships the images)
"""

from __future__ import annotations

import torch
from ray.train import RunConfig, ScalingConfig
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import elastic_train as et


def digits() -> TensorDataset:
    images, labels = load_digits(return_X_y=True)
    return TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))


def train_loop(ctx: et.Context) -> None:
    model = ctx.model("model", lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
    optimizer = ctx.optimizer("optimizer", torch.optim.SGD, model, lr=0.1, momentum=0.9)
    schedule = ctx.register("schedule", torch.optim.lr_scheduler.StepLR(optimizer, 100, gamma=0.5))
    loss_of = nn.CrossEntropyLoss()
    for batch in ctx.batches(digits):
        with ctx.step(metrics=("accuracy",)) as step:
            for images, labels in batch:
                logits = model(images)
                step.backward(loss_of(logits, labels))
                step.measure(accuracy=((logits.argmax(-1) == labels).sum(), len(labels)))
        schedule.step()
        ctx.report(loss=step.loss, accuracy=step.metrics["accuracy"])


def trainer(
    *,
    max_steps: int = 200,
    workers: str = "1:3",
    storage: str = "./runs",
    name: str = "from_ray_train",
) -> et.ElasticTrainer:
    """Classify handwritten digits."""
    least, _, most = workers.partition(":")
    return et.ElasticTrainer(
        train_loop,
        batch=et.Batch(global_size=48, micro_size=8, seed=0),
        max_steps=max_steps,
        scaling_config=ScalingConfig(num_workers=(int(least), int(most or least))),
        run_config=RunConfig(name=name, storage_path=storage),
    )


if __name__ == "__main__":
    et.main(trainer)
