"""Loops that clip, mask, zero, update or replace something by hand, or change it on the way."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.train.programs import Net, Points


def _loss(net: nn.Module, micro: Any) -> torch.Tensor:
    return (net(micro["x"]) - micro["y"]).square().mean()


def two_updates(ctx: Any) -> None:
    """A critic within the step, on its own pass, and the other at its end."""
    net, critic = ctx.model("net", Net), ctx.model("critic", lambda: Net(0.2))
    ctx.optimizer("of_net", torch.optim.AdamW, net, lr=1e-2)
    of_critic = ctx.optimizer("of_critic", torch.optim.AdamW, critic, lr=1e-2)
    for batch in ctx.batches(Points):
        with ctx.step() as step:
            for micro in batch:
                step.backward((critic(micro["x"]) - net(micro["x"]).detach()).square().mean())
            step.update(of_critic)
            for micro in batch:
                step.backward(_loss(net, micro) + critic(micro["x"] + net(micro["x"])).square().mean())


def updates_the_same_twice(ctx: Any) -> None:
    net = ctx.model("net", Net)
    optimizer = ctx.optimizer("opt", torch.optim.SGD, net, lr=1e-2)
    for batch in ctx.batches(Points):
        with ctx.step() as step:
            for _ in range(2):
                for micro in batch:
                    step.backward(_loss(net, micro))
                step.update(optimizer)


def several_backwards(ctx: Any) -> None:
    net = ctx.model("net", lambda: Net(0.2))
    ctx.optimizer("opt", torch.optim.AdamW, net, lr=1e-2)
    for batch in ctx.batches(Points):
        with ctx.step() as step:
            for micro in batch:
                out = net(micro["x"])
                step.backward((out - micro["y"]).square().mean(), retain_graph=True)
                step.backward(out.abs().mean() * 0.3)


def clips_by_hand(ctx: Any) -> None:
    net = ctx.model("net", Net)
    ctx.optimizer("opt", torch.optim.SGD, net, lr=1e-2)
    for batch in ctx.batches(Points):
        with ctx.step() as step:
            for micro in batch:
                step.backward(_loss(net, micro))
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)


def clips_in_a_hook(ctx: Any) -> None:
    """Edits the gradient where it is that of the global batch."""
    net = ctx.model("net", Net)
    optimizer = ctx.optimizer("opt", torch.optim.SGD, net, lr=1e-1)

    def clip(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            nn.utils.clip_grad_value_(group["params"], 0.1)

    optimizer.register_step_pre_hook(clip)
    for batch in ctx.batches(Points):
        with ctx.step() as step:
            for micro in batch:
                step.backward(_loss(net, micro))


def zeroes_by_hand(ctx: Any) -> None:
    """One part is left out of every second step."""
    net = ctx.model("net", Net)
    ctx.optimizer("opt", torch.optim.SGD, net, lr=1e-2)
    for batch in ctx.batches(Points):
        with ctx.step() as step:
            for micro in batch:
                step.backward(_loss(net, micro))
            if batch.step % 2:
                for p in net.a.parameters():
                    p.grad = None


def backwards_by_hand(ctx: Any) -> None:
    net = ctx.model("net", Net)
    ctx.optimizer("opt", torch.optim.SGD, net, lr=1e-2)
    for batch in ctx.batches(Points):
        with ctx.step() as step:
            for micro in batch:
                (_loss(net, micro) * 0.1).backward()
                step.backward(_loss(net, micro))


def drops_out_later(ctx: Any) -> None:
    """Sets attributes of modules at a step, for good."""
    net = ctx.model("net", lambda: Net(0.5))
    ctx.optimizer("opt", torch.optim.SGD, net, lr=1e-2)
    for batch in ctx.batches(Points):
        if batch.step == 2:
            for block in net.blocks:
                block[2].p = 0.1
        with ctx.step() as step:
            for micro in batch:
                step.backward(_loss(net, micro))


class MaskedByHand(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.mask)


def masks_later(ctx: Any) -> None:
    """Writes into a buffer at a step."""
    net = ctx.model("net", MaskedByHand)
    ctx.optimizer("opt", torch.optim.SGD, net, lr=1e-2)
    for batch in ctx.batches(Points):
        with ctx.step() as step:
            for micro in batch:
                step.backward(_loss(net, micro))
        if batch.step == 2:
            net.mask[:3] = 0.0


def new_mask_later(ctx: Any) -> None:
    """Assigns a buffer at a step."""
    net = ctx.model("net", MaskedByHand)
    ctx.optimizer("opt", torch.optim.SGD, net, lr=1e-2)
    for batch in ctx.batches(Points):
        if batch.step == 2:
            net.mask = torch.tensor([0.0, 1, 1, 0, 1, 1], dtype=torch.float64)
        with ctx.step() as step:
            for micro in batch:
                step.backward(_loss(net, micro))


def adds_a_group(ctx: Any) -> None:
    net = ctx.model("net", Net)
    optimizer = ctx.optimizer("opt", torch.optim.SGD, net.a, lr=1e-2)
    for batch in ctx.batches(Points):
        if batch.step == 2:
            optimizer.add_param_group({"params": list(net.b.parameters()), "lr": 1e-3})
        with ctx.step() as step:
            for micro in batch:
                step.backward(_loss(net, micro))


def hooks_later(ctx: Any) -> None:
    """Registers a hook at a step."""
    net = ctx.model("net", Net)
    ctx.optimizer("opt", torch.optim.SGD, net, lr=1e-2)
    for batch in ctx.batches(Points):
        if batch.step == 2:
            net.a.register_forward_hook(lambda module, inputs, output: output * 0.5)
        with ctx.step() as step:
            for micro in batch:
                step.backward(_loss(net, micro))


def replaces_a_module(ctx: Any) -> None:
    net = ctx.model("net", Net)
    ctx.optimizer("opt", torch.optim.SGD, net, lr=1e-2)
    for batch in ctx.batches(Points):
        if batch.step == 2:
            net.blocks[0][1] = nn.ReLU()
        with ctx.step() as step:
            for micro in batch:
                step.backward(_loss(net, micro))


def counts_in_a_variable(ctx: Any) -> None:
    """Of which a person is told."""
    net = ctx.model("net", Net)
    ctx.optimizer("opt", torch.optim.SGD, net, lr=1e-2)
    mean = 0.0
    for batch in ctx.batches(Points):
        with ctx.step() as step:
            for micro in batch:
                step.backward(_loss(net, micro) / (1 + mean))
        mean = 0.9 * mean + 0.1 * step.loss


def draws_between_steps(ctx: Any) -> None:
    net = ctx.model("net", Net)
    ctx.optimizer("opt", torch.optim.SGD, net, lr=1e-2)
    for batch in ctx.batches(Points):
        noise = torch.randn(6, dtype=torch.float64)
        with ctx.step() as step:
            for micro in batch:
                step.backward((net(micro["x"] + noise) - micro["y"]).square().mean())


def reads_gradients(ctx: Any) -> None:
    """Sets its rate by the gradient that was applied."""
    net = ctx.model("net", Net)
    optimizer = ctx.optimizer("opt", torch.optim.SGD, net, lr=1e-2)
    for batch in ctx.batches(Points):
        with ctx.step() as step:
            for micro in batch:
                step.backward(_loss(net, micro))
        optimizer.param_groups[0]["lr"] = 1e-2 / (1 + step.grad_norm)


def _lbfgs(ctx: Any, **settings: Any) -> None:
    """Computes the loss as often as it likes; beside it another optimizer that does not."""
    net = ctx.model("net", lambda: Net(0.1))
    other = ctx.model("other", Net)
    optimizer = ctx.optimizer("opt", torch.optim.LBFGS, net, **settings)
    ctx.optimizer("of_other", torch.optim.AdamW, other, lr=1e-2)
    for batch in ctx.batches(Points):
        with ctx.step() as step:

            def compute(batch: Any = batch, step: Any = step) -> None:
                for micro in batch:
                    step.backward((net(micro["x"]) - micro["y"]).square().mean())

            step.closure(optimizer, compute)
            for micro in batch:
                step.backward((other(micro["x"]) - micro["y"]).square().mean())


def lbfgs(ctx: Any) -> None:
    _lbfgs(ctx, lr=0.1, max_iter=4, history_size=3)


def lbfgs_with_line_search(ctx: Any) -> None:
    _lbfgs(ctx, max_iter=3, history_size=4, line_search_fn="strong_wolfe")
