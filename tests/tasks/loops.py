"""Loops of users, and the tasks that they are equal to, for the processes of a pool."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from elastic_train.testing.slow_samples import SlowSamples
from tests.tasks.tiny import TinyData, TinyModel, TinyTask

SAMPLES = 57
SETTINGS = {"lr": 3e-2}


class Whole(nn.Module):
    """The tiny model under the name that a loop gives it."""

    def __init__(self, dropout: float, norm: bool) -> None:
        super().__init__()
        self.net = TinyModel(dropout, norm)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.net(tokens)


class AsTask(TinyTask):
    """What `loop` trains, as a task. Padding is left to no step: a task shows it to statistics."""

    def model(self) -> nn.Module:
        return Whole(self.dropout, self.batch_norm)

    def schedule(self, optimizer: torch.optim.Optimizer) -> None:  # type: ignore[override]
        return None


def groups(model: nn.Module) -> list[dict[str, Any]]:
    named = list(model.parameters())
    matrices, others = [p for p in named if p.ndim > 1], [p for p in named if p.ndim < 2]
    return [
        {"params": matrices},
        {"params": [], "lr": 0.5},
        {"params": others, "lr": SETTINGS["lr"] / 3, "weight_decay": 0.0},
    ]


class Average:
    """An exponential average of a model's weights, and how often it was updated."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.updates = model, 0
        self.weights = {name: p.detach().clone() for name, p in model.named_parameters()}

    def update(self) -> None:
        self.updates += 1
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                self.weights[name].lerp_(parameter.detach(), 0.25)

    def state_dict(self) -> dict[str, Any]:
        return {"weights": dict(self.weights), "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights, self.updates = state["weights"], state["updates"]


def summed(logits: torch.Tensor, micro: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    each = F.cross_entropy(logits.flatten(0, 1), micro["targets"].flatten(), reduction="none")
    counted = micro["counted"].flatten()
    return (each * counted).sum(), counted.sum()


def plain(ctx: Any) -> None:
    """No state but a model and its optimizer."""
    net = ctx.model("net", lambda: TinyModel(0.2, True))
    ctx.optimizer("adam", torch.optim.AdamW, groups(net), **SETTINGS)
    for batch in ctx.batches(TinyData(SAMPLES)):
        with ctx.step() as step:
            for micro in batch:
                step.backward(*summed(net(micro["tokens"]), micro))


def averaged(ctx: Any, seconds: float = 0.0) -> None:
    """With an average, a schedule that the loop steps, metrics, and an evaluation every three steps.

    Loading a sample takes `seconds`.
    """
    net = ctx.model("net", lambda: TinyModel(0.2))
    optimizer = ctx.optimizer("adam", torch.optim.AdamW, groups(net), **SETTINGS)
    schedule = ctx.register("schedule", torch.optim.lr_scheduler.LinearLR(optimizer, 0.2, total_iters=10))
    average = ctx.register("average", Average(net))
    for batch in ctx.batches(lambda: SlowSamples(TinyData(SAMPLES), seconds)):
        if ctx.at and ctx.at % 3 == 0:
            found = ctx.evaluate(TinyData(17), lambda micro: right(net(micro["tokens"]), micro))
            ctx.report(**found, updates=average.updates)
        with ctx.step(metrics=("accuracy",)) as step:
            for micro in batch:
                logits = net(micro["tokens"])
                step.measure(**right(logits, micro))
                step.backward(*summed(logits, micro))
        average.update()
        schedule.step()
        ctx.report(accuracy=step.metrics["accuracy"], norm=step.grad_norm)


def right(logits: torch.Tensor, micro: dict[str, torch.Tensor]) -> dict[str, tuple[Any, Any]]:
    hits = (logits.argmax(-1) == micro["targets"]) & micro["counted"]
    return {"accuracy": (hits.sum(), micro["counted"].sum())}


class Noise(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Points around a circle, and the noise that a generator begins with."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        angle = torch.rand((), generator=generator) * 6.2832
        return {
            "real": torch.stack([angle.cos(), angle.sin()]),
            "noise": torch.randn(3, generator=generator),
        }


def two_layers(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 8), nn.LeakyReLU(0.2), nn.Linear(8, outputs))


def adversarial(ctx: Any) -> None:
    """Two models and two optimizers; the critic is updated inside the step."""
    generator = ctx.model("generator", lambda: two_layers(3, 2))
    critic = ctx.model("critic", lambda: two_layers(2, 1))
    own = ctx.optimizer("own", torch.optim.Adam, generator, lr=1e-2)
    other = ctx.optimizer("other", torch.optim.Adam, critic, lr=2e-2)
    assert own is not other
    for batch in ctx.batches(Noise()):
        with ctx.step() as step:
            for micro in batch:
                fake = generator(micro["noise"]).detach()
                step.backward(F.softplus(-critic(micro["real"])).mean())
                step.backward(F.softplus(critic(fake)).mean())
            judged = step.update(other)
            for micro in batch:
                step.backward(F.softplus(-critic(generator(micro["noise"]))).mean())
        ctx.report(critic=judged.loss)


def of_one_weight(ctx: Any) -> Any:
    """A model and an optimizer, for loops that are about something else; the loss of a micro-batch."""
    net = ctx.model("net", lambda: nn.Linear(3, 1))
    ctx.optimizer("sgd", torch.optim.SGD, net, lr=0.1)
    return lambda micro: net(micro["noise"]).square().mean()


def raises(ctx: Any) -> None:
    loss = of_one_weight(ctx)
    for batch in ctx.batches(Noise()):
        if batch.step == 3:
            raise ValueError("the loss of step 3 is no good")
        with ctx.step() as step:
            for micro in batch:
                step.backward(loss(micro))


def late(ctx: Any) -> None:
    loss = of_one_weight(ctx)
    for batch in ctx.batches(Noise()):
        with ctx.step() as step:
            for micro in batch:
                step.backward(loss(micro))
        ctx.register("late", nn.Linear(1, 1))


def evaluates_after(ctx: Any) -> None:
    loss = of_one_weight(ctx)
    for batch in ctx.batches(Noise()):
        with ctx.step() as step:
            for micro in batch:
                step.backward(loss(micro))
        ctx.evaluate(Noise(), lambda micro: {"loss": (loss(micro), 1)})


def swallows(ctx: Any) -> None:
    """Goes on forever, and takes no exception for an answer."""
    loss = of_one_weight(ctx)
    for batch in ctx.batches(Noise()):
        with ctx.step() as step:
            while True:
                try:
                    for micro in batch:
                        step.backward(loss(micro))
                except Exception:  # noqa: BLE001 - what a user should not do
                    continue


def stops(ctx: Any) -> None:
    """Early, by its own measure."""
    loss = of_one_weight(ctx)
    for batch in ctx.batches(Noise()):
        if ctx.at == 4:
            return
        with ctx.step() as step:
            for micro in batch:
                step.backward(loss(micro))


def dawdles(ctx: Any, seconds: float) -> None:
    """Takes its time behind a step, before one on one rank, and at the end."""
    net = ctx.model("net", lambda: TinyModel(0.0))
    ctx.optimizer("adam", torch.optim.AdamW, groups(net), **SETTINGS)
    for batch in ctx.batches(TinyData(SAMPLES)):
        if batch.step == 4 and ctx.rank == 1:
            time.sleep(seconds)
        with ctx.step() as step:
            for micro in batch:
                step.backward(*summed(net(micro["tokens"]), micro))
        if batch.step == 2:
            time.sleep(seconds)
    time.sleep(seconds)


def dies_at_the_end(ctx: Any, mark: Path, files: int) -> None:
    """A rank is killed once behind the last batch, where files are left that take their time to be stored."""
    net = ctx.model("net", lambda: TinyModel(0.0))
    ctx.optimizer("adam", torch.optim.AdamW, groups(net), **SETTINGS)
    for batch in ctx.batches(TinyData(SAMPLES)):
        with ctx.step() as step:
            for micro in batch:
                step.backward(*summed(net(micro["tokens"]), micro))
    if ctx.rank == 1 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    for number in range(files):
        (ctx.artifacts / f"{number:03}.bin").write_bytes(bytes(100_000))


def leaves_files(ctx: Any) -> None:
    """Files before a step, after it, and with the trained model at the end."""
    net = ctx.model("net", lambda: TinyModel(0.0))
    ctx.optimizer("adam", torch.optim.AdamW, groups(net), **SETTINGS)
    for batch in ctx.batches(TinyData(SAMPLES)):
        if ctx.at and ctx.at % 2 == 0:
            shown = ctx.artifacts / "shown"
            shown.mkdir(exist_ok=True)
            (shown / "before.txt").write_text(f"before the step after {ctx.at}")
        with ctx.step() as step:
            for micro in batch:
                step.backward(*summed(net(micro["tokens"]), micro))
        (ctx.artifacts / "after.txt").write_text(f"after {batch.step}")
    torch.save(dict(net.state_dict()), ctx.artifacts / "model.pt")
