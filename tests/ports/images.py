"""Ports of programs about images: MNIST, an ImageNet script, a VAE and a DCGAN."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset

from tests.ports.script import Script, definitions


def of(name: str) -> Any:
    """A port's file."""
    return importlib.import_module(name)


def shown(train: bool, count: int) -> TensorDataset:
    """The images and labels that the ports make in the place of MNIST."""
    return TensorDataset(*of("kit").mnist_like(train, count))


# -- MNIST ---------------------------------------------------------------------------------------------------

DIGITS = 72


def mnist(ctx: Any) -> None:
    net = ctx.model("net", of("mnist").Net)
    optimizer = ctx.optimizer("adadelta", torch.optim.Adadelta, net, lr=1.0)
    schedule = ctx.register("schedule", StepLR(optimizer, step_size=1, gamma=0.7))

    def test(micro: Any) -> dict[str, Any]:
        output = net(micro[0])
        right = output.argmax(1) == micro[1]
        return {
            "test_loss": (F.nll_loss(output, micro[1], reduction="sum"), len(right)),
            "accuracy": (right.sum(), len(right)),
        }

    held_out = shown(False, 20)
    for batch in ctx.batches(shown(True, DIGITS)):
        if ctx.at and ctx.at % batch.steps_per_epoch == 0:
            ctx.report(**ctx.evaluate(held_out, test))
        with ctx.step() as step:
            for images, labels in batch:
                step.backward(F.nll_loss(net(images), labels))
        if batch.step % batch.steps_per_epoch == 0:
            schedule.step()
    ctx.report(**ctx.evaluate(held_out, test))


def mnist_script(script: Script) -> None:
    net = script.model("net", of("mnist").Net)
    optimizer = torch.optim.Adadelta(net.parameters(), lr=1.0)
    schedule = StepLR(optimizer, step_size=1, gamma=0.7)
    images, labels = script.whole(shown(False, 20))
    for batch in script.batches(shown(True, DIGITS)):
        optimizer.zero_grad()
        loss = 0.0
        for x, y in batch:
            part = F.nll_loss(net(x), y) * (len(y) / batch.size)
            part.backward()
            loss += float(part.detach())
        optimizer.step()
        script.losses.append(loss)
        if batch.ends_epoch:
            schedule.step()
            with torch.no_grad():
                output = net.eval()(images)
            net.train()
            script.tell(
                batch.step,
                test_loss=F.nll_loss(output, labels),
                accuracy=(output.argmax(1) == labels).double().mean(),
            )


# -- ImageNet ------------------------------------------------------------------------------------------------


class Residual(nn.Module):
    """A small network of the family that the script trains: convolutions, batch norms and a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv, self.norm2 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.stem(x)))
        x = F.relu(x + self.norm2(self.conv(x)))
        return self.fc(x.mean((2, 3)))


RATE = {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4}


def hits(output: torch.Tensor, labels: torch.Tensor) -> dict[str, tuple[Any, int]]:
    """How many labels are the first guess, and one of the first five."""
    best = output.topk(5, 1).indices == labels[:, None]
    return {"acc1": (best[:, 0].sum(), len(labels)), "acc5": (best.any(1).sum(), len(labels))}


class Best:
    """What the script keeps in its checkpoints beside the weights."""

    def __init__(self) -> None:
        self.acc1 = 0.0

    def state_dict(self) -> dict[str, float]:
        return {"acc1": self.acc1}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.acc1 = state["acc1"]


def imagenet(ctx: Any) -> None:
    net = ctx.model("net", Residual)
    optimizer = ctx.optimizer("sgd", torch.optim.SGD, net, **RATE)
    schedule = ctx.register("schedule", StepLR(optimizer, step_size=1, gamma=0.1))
    best = ctx.register("best", Best())
    held_out = shown(False, 20)

    def validate() -> None:
        found = ctx.evaluate(held_out, lambda micro: hits(net(micro[0]), micro[1]))
        best.acc1 = max(best.acc1, found["acc1"])
        ctx.report(val_acc1=found["acc1"], val_acc5=found["acc5"], best_acc1=best.acc1)

    for batch in ctx.batches(shown(True, DIGITS)):
        if ctx.at and ctx.at % batch.steps_per_epoch == 0:
            validate()
        with ctx.step(metrics=("acc1", "acc5")) as step:
            for images, labels in batch:
                output = net(images)
                step.measure(**hits(output, labels))
                step.backward(F.cross_entropy(output, labels))
        ctx.report(**step.metrics)
        if batch.step % batch.steps_per_epoch == 0:
            schedule.step()
    validate()


def imagenet_script(script: Script) -> None:
    net = script.model("net", Residual)
    optimizer = torch.optim.SGD(net.parameters(), **RATE)
    schedule, best = StepLR(optimizer, step_size=1, gamma=0.1), 0.0
    for batch in script.batches(shown(True, DIGITS)):
        optimizer.zero_grad()
        loss, right = 0.0, {"acc1": 0.0, "acc5": 0.0}
        for images, labels in batch:
            output = net(images)
            part = F.cross_entropy(output, labels) * (len(labels) / batch.size)
            part.backward()
            loss += float(part.detach())
            for name, (found, _) in hits(output, labels).items():
                right[name] += float(found) / batch.size
        optimizer.step()
        script.losses.append(loss)
        script.tell(batch.step, **right)
        if batch.ends_epoch:
            schedule.step()
            net.eval()
            images, labels = script.whole(shown(False, 20))
            with torch.no_grad():
                found = {name: float(n) / total for name, (n, total) in hits(net(images), labels).items()}
            net.train()
            best = max(best, found["acc1"])
            script.tell(batch.step, val_acc1=found["acc1"], val_acc5=found["acc5"], best_acc1=best)


# -- VAE -----------------------------------------------------------------------------------------------------

IMAGES, BATCH = 40, 32


def autoencoder() -> tuple[type[nn.Module], Callable[..., torch.Tensor]]:
    """The script's model and its loss of outputs and inputs."""
    made = definitions("vae.py", "VAE", "loss_function", torch=torch, nn=nn, F=F)
    return made["VAE"], made["loss_function"]


def vae(ctx: Any) -> None:
    """Its loss is a sum over the batch, which is a mean over as much as makes one."""
    kind, loss_of = autoencoder()
    net = ctx.model("vae", kind)
    ctx.optimizer("adam", torch.optim.Adam, net, lr=1e-3)
    for batch in ctx.batches(shown(True, IMAGES)):
        last = batch.step % batch.steps_per_epoch == 0
        size = IMAGES % BATCH if last else BATCH
        with ctx.step() as step:
            for images, _ in batch:
                seen, mu, logvar = net(images)
                step.backward(loss_of(seen, images, mu, logvar), len(images) / size)


def vae_script(script: Script) -> None:
    kind, loss_of = autoencoder()
    net = script.model("vae", kind)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    for batch in script.batches(shown(True, IMAGES)):
        optimizer.zero_grad()
        loss = 0.0
        for images, _ in batch:
            seen, mu, logvar = net(images)
            part = loss_of(seen, images, mu, logvar)
            part.backward()
            loss += float(part.detach())
        optimizer.step()
        script.losses.append(loss)


# -- DCGAN ---------------------------------------------------------------------------------------------------

ADAM = {"lr": 2e-4, "betas": (0.5, 0.999)}


def wide(count: int) -> TensorDataset:
    images = F.interpolate(of("kit").mnist_like(True, count)[0], size=32) * 2 - 1
    return TensorDataset(images)


def dcgan(ctx: Any) -> None:
    port = of("dcgan")
    generator = ctx.model("generator", port.built(port.Generator))
    critic = ctx.model("critic", port.built(port.Discriminator))
    own = ctx.optimizer("critics", torch.optim.Adam, critic, **ADAM)
    ctx.optimizer("generators", torch.optim.Adam, generator, **ADAM)
    fixed = torch.randn(4, port.nz, 1, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    for batch in ctx.batches(wide(DIGITS)):
        with ctx.step(metrics=("D_x", "D_G_z1", "D_G_z2")) as step:
            fakes = []
            for (real,) in batch:
                judged = critic(real)
                step.backward(F.binary_cross_entropy(judged, torch.ones_like(judged)))
                fake = generator(torch.randn(len(real), port.nz, 1, 1, dtype=real.dtype))
                fooled = critic(fake.detach())
                fakes.append(fake)
                step.backward(F.binary_cross_entropy(fooled, torch.zeros_like(fooled)))
                step.measure(D_x=(judged.sum(), len(real)), D_G_z1=(fooled.sum(), len(real)))
            found = step.update(own)
            for _, fake in zip(batch, fakes, strict=True):
                judged = critic(fake)
                step.backward(F.binary_cross_entropy(judged, torch.ones_like(judged)))
                step.measure(D_G_z2=(judged.sum(), len(fake)))
        ctx.report(loss_D=found.loss, **step.metrics)
        if batch.step % 2 == 0:
            with torch.no_grad():  # in training mode, which changes what the batch norms have seen
                torch.save(generator(fixed), ctx.artifacts / "fakes.pt")


def dcgan_script(script: Script) -> None:
    port = of("dcgan")
    generator = script.model("generator", port.built(port.Generator))
    critic = script.model("critic", port.built(port.Discriminator))
    own, other = (torch.optim.Adam(net.parameters(), **ADAM) for net in (critic, generator))
    for batch in script.batches(wide(DIGITS)):
        critic.zero_grad()
        said = dict.fromkeys(("loss_D", "D_x", "D_G_z1", "D_G_z2"), 0.0)
        fakes = []
        for (real,) in batch:
            share = len(real) / batch.size
            judged = critic(real)
            first = F.binary_cross_entropy(judged, torch.ones_like(judged))
            (first * share).backward()
            fakes.append(generator(torch.randn(len(real), port.nz, 1, 1, dtype=real.dtype)))
            fooled = critic(fakes[-1].detach())
            second = F.binary_cross_entropy(fooled, torch.zeros_like(fooled))
            (second * share).backward()
            said["loss_D"] += float((first + second).detach()) * share
            said["D_x"] += float(judged.sum()) / batch.size
            said["D_G_z1"] += float(fooled.sum()) / batch.size
        own.step()
        generator.zero_grad()
        loss = 0.0
        for fake in fakes:
            judged = critic(fake)
            part = F.binary_cross_entropy(judged, torch.ones_like(judged)) * (len(fake) / batch.size)
            part.backward()
            loss += float(part.detach())
            said["D_G_z2"] += float(judged.sum()) / batch.size
        other.step()
        script.losses.append(loss)
        script.tell(batch.step, **said)
