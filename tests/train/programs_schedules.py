"""Programs with optimizers and schedules that people write themselves."""

from __future__ import annotations

from typing import Any

import torch

from tests.train.programs import Fit

Schedules = torch.optim.lr_scheduler


def _scheduled(schedule: Any, name: str) -> type[Fit]:
    class Given(Fit):
        def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
            return schedule(optimizer)

    Given.__name__ = Given.__qualname__ = name
    return Given


class Decays:
    """A factor with state of its own, which torch keeps as the callable's attributes."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, step: int) -> float:
        self.calls += 1
        return 1 / (1 + self.calls)


def _counting(optimizer: Any) -> Any:
    calls = [0]

    def factor(step: int) -> float:
        calls[0] += 1
        return 1 / calls[0]

    return Schedules.LambdaLR(optimizer, factor)


class OwnSchedule(Schedules.LRScheduler):
    """Also drives the weight decay, and counts for itself."""

    def __init__(self, optimizer: Any) -> None:
        self.history: dict[str, Any] = {"rates": [1e-2], "peak": 0.0}
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        self.history["rates"] = [*self.history["rates"][-2:], self.history["rates"][-1] * 0.8]
        for group in self.optimizer.param_groups:
            group["weight_decay"] = sum(self.history["rates"])
        return [self.history["rates"][-1] for _ in self.optimizer.param_groups]


decaying_object = _scheduled(lambda o: Schedules.LambdaLR(o, Decays()), "decaying_object")
decaying_closure = _scheduled(_counting, "decaying_closure")
own_schedule = _scheduled(OwnSchedule, "own_schedule")
chained = _scheduled(
    lambda o: Schedules.ChainedScheduler(
        [Schedules.ConstantLR(o, 0.1, total_iters=3), Schedules.ExponentialLR(o, 0.8)]
    ),
    "chained",
)
multiplicative = _scheduled(
    lambda o: Schedules.MultiplicativeLR(o, lambda e: 0.9 if e % 2 else 0.8), "multiplicative"
)
swa_rate = _scheduled(lambda o: torch.optim.swa_utils.SWALR(o, 0.05, anneal_epochs=4), "swa_rate")


class Lookahead(torch.optim.Optimizer):
    """Around another optimizer, which keeps its own state."""

    def __init__(self, inner: torch.optim.Optimizer, every: int = 2) -> None:
        self.inner, self.every, self.count = inner, every, 0
        super().__init__(inner.param_groups, {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if "slow" not in self.state[p]:
                    self.state[p]["slow"] = p.detach().clone()
        self.inner.step()
        self.count += 1
        if self.count % self.every == 0:
            for group in self.param_groups:
                for p in group["params"]:
                    slow = self.state[p]["slow"].lerp_(p, 0.5)
                    p.copy_(slow)


class lookahead(Fit):
    def optimizer(self, named_params: Any) -> torch.optim.Optimizer:
        return Lookahead(torch.optim.AdamW([p for _, p in named_params], lr=1e-2))


class Lamb(torch.optim.Optimizer):
    """Scales each tensor's update by norms of the whole tensor."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["m"] = torch.zeros_like(p)
                state["m"].lerp_(p.grad, 0.1)
                p.sub_(state["m"] * (group["lr"] * p.norm() / (state["m"].norm() + 1e-8)))


class lamb(Fit):
    def optimizer(self, named_params: Any) -> torch.optim.Optimizer:
        return Lamb([p for _, p in named_params])


class Centred(torch.optim.Optimizer):
    """Takes the mean of the gradient over rows off, and clips by the norm of all gradients."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        own = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = sum(float(p.grad.norm()) ** 2 for p in own) ** 0.5
        for p in own:
            gradient = p.grad - p.grad.mean(0, keepdim=True) if p.ndim > 1 else p.grad
            p.sub_(gradient, alpha=1e-2 / (1 + norm))


class centred(Fit):
    def optimizer(self, named_params: Any) -> torch.optim.Optimizer:
        return Centred([p for _, p in named_params])


class Second(torch.optim.Optimizer):
    """Works on every second step alone, on the sum of two gradients."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "k": 0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                state = self.state[p]
                state["sum"] = p.grad.clone() if "sum" not in state else state["sum"] + p.grad
                if group["k"] % 2 == 0:
                    p.sub_(state.pop("sum"), alpha=group["lr"])


class every_second_step(Fit):
    def optimizer(self, named_params: Any) -> torch.optim.Optimizer:
        return Second([p for _, p in named_params])
