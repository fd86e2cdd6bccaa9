"""Programs of unusual makes: models that are put together otherwise, and loops that keep and change things
where a script may.
"""

from __future__ import annotations

import functools
import random
from collections import OrderedDict
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from tests.train.programs import Fit, Net, Points, of_model

# -- models of unusual makes -------------------------------------------------------------------------------


class Symmetric(nn.Module):
    def forward(self, w: torch.Tensor) -> torch.Tensor:
        return w.triu() + w.triu(1).transpose(-1, -2)


class Parametrized(Net):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            parametrize.register_parametrization(block[0], "weight", Symmetric())
        parametrizations.weight_norm(self.a)


class FunctionalDropout(Net):
    """Also where the model is evaluated."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(F.dropout(x, 0.3)) + F.alpha_dropout(x, 0.2, training=self.training).mean()


class TiedLate(Net):
    """Ties weights after they were made, by the module and by the parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1][0] = self.blocks[0][0]
        self.c = nn.Linear(6, 7)
        self.c.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.c(x).mean(1, keepdim=True)


class Casts(Net):
    """Computes a part in another dtype."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.linear(x.float(), self.a.weight.float(), self.a.bias.float()).double()
        return self.b(torch.tanh(h))


class DoubleBackward(Net):
    """A gradient within forward, which the loss differentiates again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_(True)
            energy = torch.tanh(self.a(x)).square().sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return super().forward(force)


class HooksParts(Net):
    """Hooks on a part's output, its input and its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
        self.blocks[0].register_forward_hook(lambda module, args, out: out + 0.1)
        self.blocks[1].register_full_backward_hook(lambda module, gin, gout: (gin[0] * 0.5,))


class MutatesOutside(Net):
    """Changes a tensor through `.data`, which no version counts."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.data.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return super().forward(x - self.mean)


class _Registry(OrderedDict[str, Any]):
    """Made with more than a mapping, so that its own copy() fails."""

    def __init__(self, first: Any, second: Any) -> None:
        super().__init__(tanh=first, sin=second)


_REGISTRY = _Registry(torch.tanh, torch.sin)


class Registers(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(_REGISTRY["tanh"](x))


class Checkpointed(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.utils.checkpoint.checkpoint(self.a, x, use_reentrant=False)
        for block in self.blocks:
            h = h + torch.utils.checkpoint.checkpoint(block, h, use_reentrant=True)
        return self.b(h)


class SharedInside(nn.Module):
    """A parameter and a buffer that are views of one storage, and a module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Net()
        self.second = self.first
        self.register_buffer("one", torch.ones(6))
        self.register_buffer("same", self.one)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x * self.one) + self.second(x + self.same)


class StochasticDepth(Net):
    """A block is left out by chance: no rank knows what another one draws."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        for block in self.blocks:
            if not self.training or torch.rand(()) < 0.7:
                h = h + block(h)
        return self.b(h)


class LayerDrop(StochasticDepth):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        for block in random.sample(list(self.blocks), 1):
            h = h + block(h)
        return self.b(h)


class holds_its_model(Fit):
    def __init__(self) -> None:
        self.net = Net().double()

    def model(self) -> nn.Module:
        return self.net


@functools.cache
def _backbone() -> nn.Module:
    return nn.Linear(6, 7)


class caches_a_part(Fit):
    def model(self) -> nn.Module:
        net = Net()
        net.a = _backbone()
        return net


def _of_norm(norm: nn.Module = nn.LayerNorm(7)) -> nn.Module:  # noqa: B008 - as users write it
    net = Net()
    net.blocks[0].append(norm)
    return net


def _of_activation(activation: nn.Module = nn.Tanh()) -> nn.Module:  # noqa: B008
    net = Net()
    net.blocks[0][1] = activation
    return net


class default_with_tensors(Fit):
    def model(self) -> nn.Module:
        return _of_norm()


class default_without_tensors(Fit):
    def model(self) -> nn.Module:
        return _of_activation()


class loss_of_a_mean(Fit):
    def loss(self, output: Any, micro_batch: Any) -> Any:
        return (output - micro_batch["y"]).square().mean()


class loss_of_no_count(Fit):
    def loss(self, output: Any, micro_batch: Any) -> Any:
        return (output - micro_batch["y"]).square().sum(), None


stochastic_depth = of_model(StochasticDepth, "stochastic_depth")
layer_drop = of_model(LayerDrop, "layer_drop")
parametrized = of_model(Parametrized, "parametrized")
functional_dropout = of_model(FunctionalDropout, "functional_dropout")
tied_late = of_model(TiedLate, "tied_late")
casts = of_model(Casts, "casts")
double_backward = of_model(DoubleBackward, "double_backward")
hooks_parts = of_model(HooksParts, "hooks_parts")
mutates_outside = of_model(MutatesOutside, "mutates_outside")
registers = of_model(Registers, "registers")
checkpointed = of_model(Checkpointed, "checkpointed")
shared_inside = of_model(SharedInside, "shared_inside")


# -- models that torch compiles: traced, and run as they are, which takes no compiler -----------------------

BACKEND = "aot_eager"


class compiled(Fit):
    def model(self) -> Any:
        return torch.compile(Net(0.3), backend=BACKEND)


class compiled_in_place(Fit):
    def model(self) -> nn.Module:
        model = Net(0.3)
        model.compile(backend=BACKEND)
        return model


class compiled_blocks(Fit):
    """One in place, one by a wrapper, and one within that is not."""

    def model(self) -> nn.Module:
        model = Net(0.3)
        model.blocks[0].compile(backend=BACKEND)
        model.blocks[1] = torch.compile(model.blocks[1], backend=BACKEND)  # type: ignore[assignment]
        return model


class compiled_norm(Fit):
    """With running statistics."""

    def model(self) -> nn.Module:
        model = nn.Sequential(
            nn.Linear(6, 7, bias=False), nn.BatchNorm1d(7), nn.Dropout(0.3), nn.Linear(7, 1)
        )
        model.compile(backend=BACKEND)
        return model


# -- loops ---------------------------------------------------------------------------------------------------


def _loss(net: nn.Module, x: torch.Tensor, micro: Any) -> torch.Tensor:
    return (net(x) - micro["y"]).square().mean()


def carries_hidden_state(ctx: Any) -> None:
    """From one micro-batch to the next."""
    net = ctx.model("net", Net)
    ctx.optimizer("opt", torch.optim.SGD, net, lr=1e-2)
    for batch in ctx.batches(Points):
        last = torch.zeros(6, dtype=torch.float64)
        with ctx.step() as step:
            for micro in batch:
                step.backward(_loss(net, micro["x"] + last, micro))
                last = micro["x"].mean(0)


def appends_to_a_queue(ctx: Any) -> None:
    """A queue of the last features, that later micro-batches read."""
    net = ctx.model("net", Net)
    ctx.optimizer("opt", torch.optim.SGD, net, lr=1e-2)
    for batch in ctx.batches(Points):
        queue: list[torch.Tensor] = [torch.zeros(6, dtype=torch.float64)]
        with ctx.step() as step:
            for micro in batch:
                step.backward(_loss(net, micro["x"] + torch.stack(queue).mean(0), micro))
                queue.append(micro["x"].mean(0))


def numbers_micro_batches(ctx: Any) -> None:
    net = ctx.model("net", Net)
    ctx.optimizer("opt", torch.optim.SGD, net, lr=1e-2)
    for batch in ctx.batches(Points):
        with ctx.step() as step:
            for number, micro in enumerate(batch):
                step.backward(_loss(net, micro["x"], micro) / (1 + number))


def writes_a_tensor(ctx: Any) -> None:
    """In place, in a tensor of its own."""
    net = ctx.model("net", Net)
    ctx.optimizer("opt", torch.optim.SGD, net, lr=1e-2)
    mean = torch.zeros(6, dtype=torch.float64)
    for batch in ctx.batches(Points):
        with ctx.step() as step:
            for micro in batch:
                step.backward(_loss(net, micro["x"] - mean, micro))
                mean.lerp_(micro["x"].mean(0), 0.1)


class Trainer:
    """A loop as a class: what it keeps are its attributes."""

    def __init__(self) -> None:
        self.mean = 0.0

    def __call__(self, ctx: Any) -> None:
        net = ctx.model("net", Net)
        ctx.optimizer("opt", torch.optim.SGD, net, lr=1e-2)
        for batch in ctx.batches(Points):
            with ctx.step() as step:
                for micro in batch:
                    loss = _loss(net, micro["x"], micro) / (1 + self.mean)
                    step.backward(loss)
                    self.mean = 0.9 * self.mean + 0.1 * float(loss.detach())


def keeps_attributes(ctx: Any) -> None:
    Trainer()(ctx)


def adds_up_losses(ctx: Any) -> None:
    """To print them: nothing else reads the sum."""
    net = ctx.model("net", Net)
    ctx.optimizer("opt", torch.optim.SGD, net, lr=1e-2)
    for batch in ctx.batches(Points):
        total, seen = 0.0, []
        with ctx.step() as step:
            for micro in batch:
                loss = _loss(net, micro["x"], micro)
                step.backward(loss)
                total += loss.item()
                seen.append(loss.item())
        assert total > 0
        assert seen


def draws_in_the_body(ctx: Any) -> None:
    """From all the global generators, before, in and behind micro-batches."""
    net = ctx.model("net", Net)
    ctx.optimizer("opt", torch.optim.SGD, net, lr=1e-2)
    for batch in ctx.batches(Points):
        shift = random.random() + float(np.random.rand())
        with ctx.step() as step:
            for micro in batch:
                x = micro["x"] + torch.rand(6, dtype=torch.float64) * shift + random.random()
                step.backward(_loss(net, x, micro))


def rates_as_tensors(ctx: Any) -> None:
    """Sets the rate of one group by hand, a tensor, in place."""
    net = ctx.model("net", Net)
    rate = torch.tensor(1e-3, dtype=torch.float64)
    own = [*net.a.parameters(), *net.blocks.parameters()]
    groups = [{"params": own}, {"params": list(net.b.parameters()), "lr": rate}]
    optimizer = ctx.optimizer("opt", torch.optim.AdamW, groups, lr=1e-2)
    for batch in ctx.batches(Points):
        with ctx.step() as step:
            for micro in batch:
                step.backward(_loss(net, micro["x"], micro))
        optimizer.param_groups[1]["lr"].mul_(0.5)
        optimizer.param_groups[0]["lr"] *= 0.7


def swaps_data(ctx: Any) -> None:
    """Puts other data into a parameter behind the block."""
    net = ctx.model("net", Net)
    ctx.optimizer("opt", torch.optim.SGD, net, lr=1e-2)
    for batch in ctx.batches(Points):
        with ctx.step() as step:
            for micro in batch:
                step.backward(_loss(net, micro["x"], micro))
        net.a.bias.data = net.a.bias.data * 0.5


def accumulates_in_a_module(ctx: Any) -> None:
    """In a plain attribute of the model, from the loop."""
    net = ctx.model("net", Net)
    net.scale = 1.0
    ctx.optimizer("opt", torch.optim.SGD, net, lr=1e-2)
    for batch in ctx.batches(Points):
        with ctx.step() as step:
            for micro in batch:
                step.backward(_loss(net, micro["x"], micro) * net.scale)
                net.scale *= 0.9
