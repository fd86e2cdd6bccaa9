"""Draw handwritten digits: a generator and a critic, each with its own optimizer, in one loop.

python jobs/gan_digits.py --max-steps 400        (needs scikit-learn, which ships the images)
"""

from __future__ import annotations

from functools import partial

import torch
from ray.train import CheckpointConfig, RunConfig, ScalingConfig
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import softplus

import elastic_train as et

NOISE = 16


class Digits:
    """Images [64] in -1 .. 1, each with noise for the generator, seeded by (seed, epoch, image)."""

    def __init__(self):
        self.images = torch.tensor(load_digits(return_X_y=True)[0] / 8 - 1, dtype=torch.float32)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"image": self.images[index], "noise": torch.randn(NOISE)}


class Average:
    """An exponential average of a model's weights, which draws better than the last ones."""

    def __init__(self, model: nn.Module, decay: float):
        self.model, self.decay = model, decay
        self.weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}

    @torch.no_grad()
    def update(self) -> None:
        for name, weight in self.model.named_parameters():
            self.weights[name].lerp_(weight.detach(), 1 - self.decay)

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self.weights)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.weights = state


def network(inputs: int, width: int, outputs: int, last: nn.Module) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2),
        nn.Linear(width, outputs), last,
    )  # fmt: skip


def train(ctx: et.Context, *, width: int, lr: float, every: int) -> None:
    """The critic is updated inside the step, the generator where it ends: both are committed, or none."""
    generator = ctx.model("generator", lambda: network(NOISE, width, 64, nn.Tanh()))
    critic = ctx.model("critic", lambda: network(64, width, 1, nn.Identity()))
    ctx.optimizer("draws", torch.optim.Adam, generator, lr=lr, betas=(0.5, 0.99))
    judges = ctx.optimizer("judges", torch.optim.Adam, critic, lr=lr, betas=(0.5, 0.99))
    average = ctx.register("average", Average(generator, 0.99))

    def fooled(micro: dict[str, Tensor]) -> dict[str, tuple[Tensor, int]]:
        drawn = critic(generator(micro["noise"])) > 0
        return {"fooled": (drawn.sum(), len(drawn))}

    for batch in ctx.batches(Digits):
        if ctx.at % every == 0:
            ctx.report(**ctx.evaluate(Digits(), fooled))
        with ctx.step() as step:
            for micro in batch:
                drawn = generator(micro["noise"]).detach()
                step.backward(softplus(-critic(micro["image"])).mean() + softplus(critic(drawn)).mean())
            judged = step.update(judges)
            for micro in batch:
                step.backward(softplus(-critic(generator(micro["noise"]))).mean())
        average.update()
        ctx.report(critic_loss=judged.loss, generator_loss=step.loss)


def trainer(
    *,
    width: int = 64,
    global_size: int = 48,
    micro_size: int = 8,
    max_steps: int = 400,
    lr: float = 2e-3,
    every: int = 50,
    seed: int = 0,
    workers: str = "1:3",
    storage: str = "./runs",
    name: str = "gan_digits",
) -> et.ElasticTrainer:
    """Draw handwritten digits with two networks that train against each other."""
    least, _, most = workers.partition(":")
    return et.ElasticTrainer(
        partial(train, width=width, lr=lr, every=every),
        batch=et.Batch(global_size=global_size, micro_size=micro_size, seed=seed),
        max_steps=max_steps,
        scaling_config=ScalingConfig(num_workers=(int(least), int(most or least))),
        run_config=RunConfig(
            name=name, storage_path=storage, checkpoint_config=CheckpointConfig(num_to_keep=2)
        ),
    )


if __name__ == "__main__":
    et.main(trainer)
