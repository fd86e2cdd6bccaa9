"""Programs that are loops."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.train.programs import Net, Points


def _body(net: nn.Module, batch: Any, step: Any) -> None:
    for micro in batch:
        step.backward((net(micro["x"]) - micro["y"]).square().mean())


def a_loop(ctx: Any) -> None:
    net = ctx.model("net", lambda: Net(0.2))
    ctx.optimizer("opt", torch.optim.AdamW, net, lr=1e-2)
    for batch in ctx.batches(Points):
        with ctx.step() as step:
            _body(net, batch, step)


class Average:
    """The usual idiom: a copy of the model, moved towards it."""

    def __init__(self, net: nn.Module) -> None:
        self.net = copy.deepcopy(net).requires_grad_(False)

    @torch.no_grad()
    def update(self, net: nn.Module) -> None:
        for mine, its in zip(self.net.parameters(), net.parameters(), strict=True):
            mine.lerp_(its.detach(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return self.net.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.net.load_state_dict(state)


def copied_average(ctx: Any) -> None:
    """The average is mixed into the model every second step, so that a wrong one shows."""
    net = ctx.model("net", lambda: Net(0.2))
    ctx.optimizer("opt", torch.optim.AdamW, net, lr=1e-2)
    average = ctx.register("average", Average(net))
    for batch in ctx.batches(Points):
        with ctx.step() as step:
            _body(net, batch, step)
        average.update(net)
        if batch.step % 2 == 0:
            with torch.no_grad():
                for mine, its in zip(net.parameters(), average.net.parameters(), strict=True):
                    mine.lerp_(its, 0.5)


def averaged_model(ctx: Any) -> None:
    net = ctx.model("net", Net)
    ctx.optimizer("opt", torch.optim.AdamW, net, lr=1e-2)
    average = ctx.register("average", AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9)))
    for batch in ctx.batches(Points):
        with ctx.step() as step:
            _body(net, batch, step)
        average.update_parameters(net)
        if batch.step == 4:
            with torch.no_grad():
                for mine, its in zip(net.parameters(), average.module.parameters(), strict=True):
                    mine.copy_(its)


def unfreezes(ctx: Any) -> None:
    net = ctx.model("net", Net)
    net.a.requires_grad_(False)
    ctx.optimizer("opt", torch.optim.SGD, net, lr=1e-2)
    for batch in ctx.batches(Points):
        if batch.step == 3:
            net.a.requires_grad_(True)
        with ctx.step() as step:
            _body(net, batch, step)


def clamps(ctx: Any) -> None:
    """Edits weights behind the block, as a Wasserstein critic's are."""
    net = ctx.model("net", Net)
    ctx.optimizer("opt", torch.optim.SGD, net, lr=1e-1)
    for batch in ctx.batches(Points):
        with ctx.step() as step:
            _body(net, batch, step)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.clamp_(-0.2, 0.2)


def clamps_before(ctx: Any) -> None:
    net = ctx.model("net", Net)
    ctx.optimizer("opt", torch.optim.SGD, net, lr=1e-1)
    for batch in ctx.batches(Points):
        with torch.no_grad():
            net.a.weight.mul_(0.99)
        with ctx.step() as step:
            _body(net, batch, step)


def clamps_inside(ctx: Any) -> None:
    net = ctx.model("net", Net)
    ctx.optimizer("opt", torch.optim.SGD, net, lr=1e-1)
    for batch in ctx.batches(Points):
        with ctx.step() as step:
            _body(net, batch, step)
            with torch.no_grad():
                net.a.weight.clamp_(-0.2, 0.2)


def steps_itself(ctx: Any) -> None:
    """Calls the optimizer as a script does."""
    net = ctx.model("net", Net)
    optimizer = ctx.optimizer("opt", torch.optim.SGD, net, lr=1e-1)
    for batch in ctx.batches(Points):
        with ctx.step() as step:
            _body(net, batch, step)
            optimizer.step()


def rate_by_hand(ctx: Any) -> None:
    """Cut once, at a step."""
    net = ctx.model("net", Net)
    optimizer = ctx.optimizer("opt", torch.optim.AdamW, net, lr=1e-2)
    for batch in ctx.batches(Points):
        with ctx.step() as step:
            _body(net, batch, step)
        if batch.step == 2:
            for group in optimizer.param_groups:
                group["lr"] *= 0.1
                group["weight_decay"] = 0.3


def rate_of_the_step(ctx: Any) -> None:
    net = ctx.model("net", Net)
    optimizer = ctx.optimizer("opt", torch.optim.AdamW, net, lr=1e-2)
    for batch in ctx.batches(Points):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / batch.step
        with ctx.step() as step:
            _body(net, batch, step)


def scheduled(ctx: Any) -> None:
    net = ctx.model("net", Net)
    optimizer = ctx.optimizer("opt", torch.optim.SGD, net, lr=1e-2, momentum=0.9)
    schedule = ctx.register(
        "schedule", torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=40, pct_start=0.5)
    )
    for batch in ctx.batches(Points):
        with ctx.step() as step:
            _body(net, batch, step)
        schedule.step()


def fixed_noise(ctx: Any) -> None:
    """Draws before its first batch, between models and after them, what it uses throughout."""
    net = ctx.model("net", Net)
    noise = torch.randn(6, dtype=torch.float64)
    other = ctx.model("other", Net)
    shift = torch.from_numpy(np.random.randn(6))
    ctx.optimizer("opt", torch.optim.AdamW, [*net.parameters(), *other.parameters()], lr=1e-2)
    for batch in ctx.batches(Points):
        with ctx.step() as step:
            for micro in batch:
                found = net(micro["x"] + noise) + other(micro["x"] * shift)
                step.backward((found - micro["y"]).square().mean())


class Queue:
    """What a loop keeps."""

    def __init__(self) -> None:
        self.rows = torch.randn(4, 6, dtype=torch.float64)

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rows = state["rows"]


def queue(ctx: Any) -> None:
    net = ctx.model("net", Net)
    ctx.optimizer("opt", torch.optim.AdamW, net, lr=1e-2)
    kept = ctx.register("kept", Queue())
    for batch in ctx.batches(Points):
        with ctx.step() as step:
            for micro in batch:
                found = net(micro["x"] + kept.rows.mean(0))
                step.backward((found - micro["y"]).square().mean())
        kept.rows = torch.cat([kept.rows[1:], torch.full((1, 6), step.loss, dtype=torch.float64)])


def evaluation_mode(ctx: Any) -> None:
    """A part is put into evaluation mode at a step, for good."""
    net = ctx.model("net", lambda: Net(0.3))
    ctx.optimizer("opt", torch.optim.AdamW, net, lr=1e-2)
    for batch in ctx.batches(Points):
        if batch.step == 3:
            net.blocks.eval()
        with ctx.step() as step:
            _body(net, batch, step)


def hook_of_the_loop(ctx: Any) -> None:
    net = ctx.model("net", Net)
    net.a.weight.register_hook(lambda gradient: gradient * 0.5)
    net.blocks[0].register_forward_hook(lambda module, inputs, output: output * 0.5)
    ctx.optimizer("opt", torch.optim.SGD, net, lr=1e-2)
    for batch in ctx.batches(Points):
        with ctx.step() as step:
            _body(net, batch, step)


def penalty(ctx: Any) -> None:
    """A gradient penalty: a second derivative."""
    net = ctx.model("net", Net)
    ctx.optimizer("opt", torch.optim.SGD, net, lr=1e-2)
    for batch in ctx.batches(Points):
        with ctx.step() as step:
            for micro in batch:
                x = micro["x"].requires_grad_(True)
                y = net(x)
                (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
                step.backward((y - micro["y"]).square().mean() + (slope.norm(dim=1) - 1).square().mean())


class WithMethod(Net):
    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x)


def other_method(ctx: Any) -> None:
    net = ctx.model("net", WithMethod)
    ctx.optimizer("opt", torch.optim.SGD, net, lr=1e-2)
    for batch in ctx.batches(Points):
        with ctx.step() as step:
            for micro in batch:
                step.backward(net.encode(micro["x"]).square().mean())


class Cell(nn.Module):
    """A step of a recurrent network."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.GRUCell(6, 5), nn.Linear(5, 1)

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.cell(x, h)
        return self.out(h), h


def carries_columns(ctx: Any) -> None:
    """Truncated backpropagation: each place of the batch goes on from its own hidden state, which begins anew
    with each epoch."""
    net = ctx.model("net", Cell)
    ctx.optimizer("opt", torch.optim.AdamW, net, lr=1e-2)
    hidden = [
        ctx.carry("there", torch.zeros(8, 5, dtype=torch.float64)),
        ctx.carry("back", torch.zeros(5, 8, dtype=torch.float64), dim=1),
    ]
    for batch in ctx.batches(Points):
        if (batch.step - 1) % batch.steps_per_epoch == 0:
            for rows in hidden:
                rows.value = torch.zeros_like(rows.value)
        with ctx.step() as step:
            for micro in batch:
                out, h = net(micro["x"], hidden[0].get())
                again, k = net(micro["x"].flip(1), hidden[1].get().t())
                step.backward((out + again - micro["y"]).square().mean())
                for rows, value in zip(hidden, (h, k.t()), strict=True):
                    rows.set(value)
