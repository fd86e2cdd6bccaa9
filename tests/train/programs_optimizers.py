"""Programs that are about optimizers and schedules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.train.programs import Fit, Net

Schedules = torch.optim.lr_scheduler


class InGroups(torch.optim.Optimizer):
    """Adam with its counter in each group, as fused and schedule-free optimizers have it."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "step": 0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
                state["m"].lerp_(p.grad, 0.1)
                state["v"].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
                m, v = state["m"] / (1 - 0.9 ** group["step"]), state["v"] / (1 - 0.99 ** group["step"])
                p.addcdiv_(m, v.sqrt() + 1e-8, value=-group["lr"])


class OnObject(InGroups):
    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, lr)
        self.history = {"k": 0, "sums": [0.0]}

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.history["k"] += 1
        self.history["sums"].append(0.5)
        for group in self.param_groups:
            group["step"] = self.history["k"] + int(sum(self.history["sums"])) - 1
        super().step()


class UnderKey(InGroups):
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        own = self.state.setdefault("global", {"k": torch.zeros((), dtype=torch.int64)})  # type: ignore[arg-type]
        own["k"] += 1
        for group in self.param_groups:
            group["step"] = int(own["k"]) - 1
        super().step()


class TensorInGroup(InGroups):
    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            group["warm"] = torch.full((3,), 1.0)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["warm"].mul_(0.5)
            group["lr"] = 1e-2 * (1 - float(group["warm"][0]))
        super().step()


class Averages(InGroups):
    """Keeps tensors where they belong to no parameter."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, lr)
        self.averages: dict[Any, torch.Tensor] = {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                self.averages.setdefault(p, p.detach().clone()).lerp_(p, 0.1)
                p.lerp_(self.averages[p], 0.5)


class ScheduleFree(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float = 1e-2, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "k": 0, "weights": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            weight = group["lr"] ** 2
            group["weights"] += weight
            share = weight / group["weights"]
            group["k"] += 1
            for p in group["params"]:
                state = self.state[p]
                if "z" not in state:
                    state["z"] = p.clone()
                p.lerp_(state["z"], share)
                p.add_(p.grad, alpha=group["lr"] * (group["momentum"] * (1 - share) - 1))
                state["z"].sub_(p.grad, alpha=group["lr"])


class CountsElements(torch.optim.Optimizer):
    """What it calls step counts each element's updates."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                count = self.state[p].setdefault("step", torch.zeros_like(p))
                count += p.grad != 0
                p.sub_(group["lr"] * p.grad / count.clamp(min=1).sqrt())


def _of(make: Callable[[Any], torch.optim.Optimizer], schedule: Any = None, name: str = "") -> type[Fit]:
    """A task with this optimizer over two groups."""

    class Given(Fit):
        def optimizer(self, named_params: Any) -> torch.optim.Optimizer:
            named = [p for _, p in named_params]
            return make(
                [{"params": [p for p in named if p.ndim > 1]}, {"params": [p for p in named if p.ndim < 2]}]
            )

        def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
            return schedule(optimizer) if schedule is not None else None

    Given.__name__ = Given.__qualname__ = name
    return Given


def _sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-2, momentum=0.9)


def _adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


counter_in_groups = _of(InGroups, name="counter_in_groups")
counter_on_object = _of(OnObject, name="counter_on_object")
counter_under_key = _of(UnderKey, name="counter_under_key")
tensor_in_group = _of(TensorInGroup, name="tensor_in_group")
averages_on_object = _of(Averages, name="averages_on_object")
counts_elements = _of(CountsElements, name="counts_elements")
schedule_free = _of(ScheduleFree, name="schedule_free")
one_cycle_adamw = _of(
    _adamw, lambda o: Schedules.OneCycleLR(o, 0.05, total_steps=40, pct_start=0.5), name="one_cycle_adamw"
)
one_cycle_sgd = _of(
    _sgd, lambda o: Schedules.OneCycleLR(o, 0.05, total_steps=40, pct_start=0.5), name="one_cycle_sgd"
)
cyclic_sgd = _of(
    _sgd, lambda o: Schedules.CyclicLR(o, 0.001, 0.05, step_size_up=4, cycle_momentum=True), name="cyclic_sgd"
)
plateau = _of(_adamw, lambda o: Schedules.ReduceLROnPlateau(o, patience=1, factor=0.5), name="plateau")
warm_restarts = _of(_adamw, lambda o: Schedules.CosineAnnealingWarmRestarts(o, 3, 2), name="warm_restarts")
sequential = _of(
    _adamw,
    lambda o: Schedules.SequentialLR(
        o, [Schedules.LinearLR(o, 0.1, total_iters=3), Schedules.CosineAnnealingLR(o, 6)], [3]
    ),
    name="sequential",
)
fused_adamw = _of(lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=True), name="fused_adamw")
amsgrad = _of(lambda ps: torch.optim.AdamW(ps, lr=1e-2, amsgrad=True, foreach=True), name="amsgrad")
nadam = _of(lambda ps: torch.optim.NAdam(ps, lr=1e-2), name="nadam")
asgd = _of(lambda ps: torch.optim.ASGD(ps, lr=1e-2), name="asgd")
adagrad = _of(lambda ps: torch.optim.Adagrad(ps, lr=1e-2), name="adagrad")


class average_by_hook(Fit):
    def optimizer(self, named_params: Any) -> torch.optim.Optimizer:
        made = torch.optim.SGD([p for _, p in named_params], lr=1e-2)
        made.avg = {}  # type: ignore[attr-defined]

        @torch.no_grad()
        def average(optimizer: Any, *_: Any) -> None:
            for p in optimizer.param_groups[0]["params"]:
                optimizer.avg.setdefault(p, p.detach().clone()).lerp_(p, 0.1)

        made.register_step_post_hook(average)
        return made


class counting_hook(Fit):
    def optimizer(self, named_params: Any) -> torch.optim.Optimizer:
        made = torch.optim.SGD([p for _, p in named_params], lr=1e-2)
        calls = [0]

        def count(optimizer: Any, *_: Any) -> None:
            calls[0] += 1
            optimizer.param_groups[0]["lr"] = 1e-2 / calls[0]

        made.register_step_pre_hook(count)
        return made


class clamping_hook(Fit):
    """Weights are clamped after each update: no state."""

    def optimizer(self, named_params: Any) -> torch.optim.Optimizer:
        made = torch.optim.SGD([p for _, p in named_params], lr=1e-1)

        @torch.no_grad()
        def clamp(optimizer: Any, *_: Any) -> None:
            for p in optimizer.param_groups[0]["params"]:
                p.clamp_(-0.2, 0.2)

        made.register_step_post_hook(clamp)
        return made


class Emptied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.empty, self.scalar = nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scalar + self.empty.sum()


class empty_parameter(Fit):
    def model(self) -> nn.Module:
        return Emptied()


class sparse_adam(Fit):
    """For sparse gradients, and here they are dense."""

    def optimizer(self, named_params: Any) -> torch.optim.Optimizer:
        return torch.optim.SparseAdam([p for _, p in named_params])


PROGRAMS = (
    counter_in_groups,
    counter_on_object,
    counter_under_key,
    tensor_in_group,
    averages_on_object,
    schedule_free,
    one_cycle_adamw,
    one_cycle_sgd,
    cyclic_sgd,
    plateau,
    warm_restarts,
    sequential,
    fused_adamw,
    amsgrad,
    nadam,
    asgd,
    adagrad,
    average_by_hook,
    counting_hook,
    clamping_hook,
    empty_parameter,
    sparse_adam,
)
