"""Programs that freeze and unfreeze parts of their models while they train."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.train.programs import Net, Points, of_model


class FlipsGrad(Net):
    """Freezes a part by chance, anew in each forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.a.requires_grad_(bool(torch.rand(()) < 0.5))
        return super().forward(x)


class FlipsBlock(Net):
    """Freezes what is gathered alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            block.requires_grad_(bool(torch.rand(()) < 0.5))
        return super().forward(x)


class FlipsInPart(nn.Sequential):
    """Freezes itself by chance, where it is called."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for parameter in self.parameters():
            parameter.requires_grad = bool(torch.rand(()) < 0.5)
        return super().forward(x)


class WithFlippingPart(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0] = FlipsInPart(*self.blocks[0])


class FreezesItself(Net):
    """A part from its first forward on."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.a.requires_grad_(False)
        return super().forward(x)


class FreezesForGood(Net):
    """By chance, and does not think of it again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.rand(()) < 0.3:
            self.a.requires_grad_(False)
        return super().forward(x)


class FreezesBySamples(Net):
    """By what is in a micro-batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.a.requires_grad_(bool(x.mean() > 0))
        return super().forward(x)


flips_grad = of_model(FlipsGrad, "flips_grad")
flips_block = of_model(FlipsBlock, "flips_block")
flips_in_part = of_model(WithFlippingPart, "flips_in_part")
freezes_itself = of_model(FreezesItself, "freezes_itself")
freezes_for_good = of_model(FreezesForGood, "freezes_for_good")
freezes_by_samples = of_model(FreezesBySamples, "freezes_by_samples")


def freezes_the_critic(ctx: Any) -> None:
    """As scripts of adversarial training do, inside the step."""
    net = ctx.model("net", Net)
    critic = ctx.model("critic", Net)
    ctx.optimizer("opt", torch.optim.AdamW, net, lr=1e-2)
    of_critic = ctx.optimizer("of_critic", torch.optim.AdamW, critic, lr=1e-2)
    for batch in ctx.batches(Points):
        with ctx.step() as step:
            critic.requires_grad_(True)
            for micro in batch:
                fake = net(micro["x"]).detach()
                step.backward((critic(micro["x"] + fake) - micro["y"]).square().mean())
            step.update(of_critic)
            critic.requires_grad_(False)
            for micro in batch:
                fake = net(micro["x"])
                step.backward((fake - micro["y"]).square().mean() + critic(micro["x"] + fake).square().mean())


def flips_in_body(ctx: Any) -> None:
    """By chance, for each micro-batch."""
    net = ctx.model("net", Net)
    ctx.optimizer("opt", torch.optim.SGD, net, lr=1e-2)
    for batch in ctx.batches(Points):
        with ctx.step() as step:
            for micro in batch:
                net.a.requires_grad_(bool(torch.rand(()) < 0.5))
                step.backward((net(micro["x"]) - micro["y"]).square().mean())


def flips_and_resets(ctx: Any) -> None:
    net = ctx.model("net", Net)
    ctx.optimizer("opt", torch.optim.SGD, net, lr=1e-2)
    for batch in ctx.batches(Points):
        with ctx.step() as step:
            for micro in batch:
                net.a.requires_grad_(bool(torch.rand(()) < 0.5))
                step.backward((net(micro["x"]) - micro["y"]).square().mean())
            net.a.requires_grad_(True)


def freezes_in_body(ctx: Any) -> None:
    """By chance, and for good."""
    net = ctx.model("net", Net)
    ctx.optimizer("opt", torch.optim.SGD, net, lr=1e-2)
    for batch in ctx.batches(Points):
        with ctx.step() as step:
            for micro in batch:
                if torch.rand(()) < 0.3:
                    net.a.requires_grad_(False)
                step.backward((net(micro["x"]) - micro["y"]).square().mean())


def keeps_fakes(ctx: Any) -> None:
    """A second pass goes on with what the first one made of each micro-batch."""
    net = ctx.model("net", lambda: Net(0.2))
    critic = ctx.model("critic", Net)
    ctx.optimizer("opt", torch.optim.AdamW, net, lr=1e-2)
    of_critic = ctx.optimizer("of_critic", torch.optim.AdamW, critic, lr=1e-2)
    for batch in ctx.batches(Points):
        with ctx.step() as step:
            fakes = []
            for micro in batch:
                fake = net(micro["x"])
                step.backward((critic(micro["x"] + fake.detach()) - micro["y"]).square().mean())
                fakes.append(fake)
            step.update(of_critic)
            for micro, fake in zip(batch, fakes, strict=True):
                step.backward(critic(micro["x"] + fake).square().mean())


def reads_another_fake(ctx: Any) -> None:
    """A second pass reads what the first one made of other micro-batches."""
    net = ctx.model("net", Net)
    ctx.optimizer("opt", torch.optim.AdamW, net, lr=1e-2)
    for batch in ctx.batches(Points):
        with ctx.step() as step:
            seen = []
            for micro in batch:
                seen.append(net(micro["x"]).detach().mean())
            for micro in batch:
                step.backward((net(micro["x"]) - micro["y"] - torch.stack(seen).mean()).square().mean())
