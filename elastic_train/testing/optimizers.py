"""Two optimizers that torch lacks, as their papers have them, to be trained with and undone in tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


class Lion(torch.optim.Optimizer):
    """Sign of an interpolated momentum, with decoupled decay (arXiv 2302.06675)."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "exp_avg" not in state:
                    state["exp_avg"] = torch.zeros_like(p)
                average = state["exp_avg"]
                p.mul_(1.0 - group["lr"] * group["weight_decay"])
                p.sub_((average * first + p.grad * (1.0 - first)).sign(), alpha=group["lr"])
                average.mul_(second).add_(p.grad, alpha=1.0 - second)


class LAMB(torch.optim.Optimizer):
    """Adam's direction with decay, scaled by a trust ratio of the whole tensor (arXiv 1904.00962)."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = torch.zeros(())
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                state["step"] += 1
                average, square, step = state["exp_avg"], state["exp_avg_sq"], int(state["step"])
                average.mul_(first).add_(p.grad, alpha=1.0 - first)
                square.mul_(second).addcmul_(p.grad, p.grad, value=1.0 - second)
                root = (square / (1.0 - second**step)).sqrt() + group["eps"]
                update = average / (1.0 - first**step) / root + group["weight_decay"] * p
                norm, size = torch.linalg.vector_norm(p), torch.linalg.vector_norm(update)
                ratio = float(norm / size) if norm > 0 and size > 0 else 1.0
                p.sub_(update, alpha=group["lr"] * ratio)
