"""Programs that ask where they run, or what was computed before them."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import get_world_size, is_initialized

from tests.train.programs import Fit, Net, Points, of_model


class ByRank(Net):
    """Noise of its own on each rank."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rank = dist.get_rank() if dist.is_initialized() else 0
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(rank), dtype=x.dtype)
        return super().forward(x + noise)


class BySize(Net):
    """Imported by name."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x / (get_world_size() if is_initialized() else 1))


class ByVariable(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + float(os.environ.get("RANK", "0")))


class ByProcess(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + os.getpid() % 7)


class SpeaksOnce(Net):
    """Asks which rank it is, to say something once, and where it may write."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not dist.is_initialized() or dist.get_rank() == 0:
            assert x.isfinite().all(), os.environ.get("HOSTNAME", "")
        return super().forward(x)


class ByGradients(Net):
    """Scales by a gradient, which is that of the micro-batches before."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gradient = self.a.weight.grad
        return super().forward(x if gradient is None else x / (1 + gradient.abs().mean()))


class looks_at_gradients(Fit):
    """In the loss, through the model that it made."""

    def model(self) -> nn.Module:
        self.net = Net()
        return self.net

    def loss(self, output: Any, micro_batch: Any) -> Any:
        known = sum(p.grad.square().sum() for p in self.net.parameters() if p.grad is not None)
        return (output - micro_batch["y"]).square().sum() / (1 + known), len(output)


class talks_itself(Fit):
    """Centres its outputs by those of all ranks."""

    def loss(self, output: Any, micro_batch: Any) -> Any:
        mean = output.detach().mean()
        if dist.is_initialized():
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        return (output - mean - micro_batch["y"]).square().sum(), len(output)


def asks_in_a_loop(ctx: Any) -> None:
    net = ctx.model("net", ByRank)
    ctx.optimizer("opt", torch.optim.SGD, net, lr=1e-2)
    for batch in ctx.batches(Points):
        with ctx.step() as step:
            for micro in batch:
                step.backward((net(micro["x"]) - micro["y"]).square().mean())


def adds_its_rank(ctx: Any) -> None:
    net = ctx.model("net", Net)
    ctx.optimizer("opt", torch.optim.SGD, net, lr=1e-2)
    for batch in ctx.batches(Points):
        shift = 0.1 * ctx.rank
        with ctx.step() as step:
            for micro in batch:
                x = micro["x"] + shift
                step.backward((net(x) - micro["y"]).square().mean())


def tells_its_rank(ctx: Any) -> None:
    """And does on one rank what trains nothing."""
    net = ctx.model("net", Net)
    ctx.optimizer("opt", torch.optim.SGD, net, lr=1e-2)
    said: list[str] = []
    for batch in ctx.batches(Points):
        with ctx.step() as step:
            for micro in batch:
                step.backward((net(micro["x"]) - micro["y"]).square().mean())
        if ctx.rank == 0:
            said.append(f"step {batch.step} on rank {ctx.rank} of {ctx.world_size}")
    assert ctx.rank > 0 or said


by_rank = of_model(ByRank, "by_rank")
by_size = of_model(BySize, "by_size")
by_variable = of_model(ByVariable, "by_variable")
by_process = of_model(ByProcess, "by_process")
speaks_once = of_model(SpeaksOnce, "speaks_once")
by_gradients = of_model(ByGradients, "by_gradients")
