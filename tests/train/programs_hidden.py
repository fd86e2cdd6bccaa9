"""Programs that keep something where no module holds it: in classes, globals, closures, caches, variables of
a loop, and in attributes that the first call alone sets.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.train.programs import Fit, Net, Points, of_model

# -- state of classes, modules of Python and functions: it matters from the hundredth call on


class OnClass(Net):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        OnClass.calls += 1
        return super().forward(x * (2.0 if OnClass.calls > 100 else 1.0))


_CALLS = 0
_HISTORY: list[float] = []
_LOGGED: list[float] = []
_BANK: dict[str, Any] = {}


class InGlobal(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        global _CALLS
        _CALLS += 1
        return super().forward(x * (2.0 if _CALLS > 100 else 1.0))


class InList(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _HISTORY.append(float(x.mean()))
        return super().forward(x * (2.0 if len(_HISTORY) > 100 else 1.0))


class InBank(Net):
    """A memory of the last features, as contrastive losses have it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        before = _BANK.get("features")
        _BANK["features"] = h.detach().mean(0) if before is None else before.lerp(h.detach().mean(0), 0.5)
        return self.b(h)


def _counting() -> Callable[[torch.Tensor], torch.Tensor]:
    calls = 0

    def scaled(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return x * (2.0 if calls > 100 else 1.0)

    return scaled


class InClosure(Net):
    def __init__(self) -> None:
        super().__init__()
        self.scaled = _counting()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.scaled(x))


_scaled = _counting()


class InGlobalClosure(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(_scaled(x))


def _remembers(x: torch.Tensor, kept: list[int] = []) -> torch.Tensor:  # noqa: B006 - what this is about
    kept.append(1)
    return x * (2.0 if len(kept) > 100 else 1.0)


class InDefault(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(_remembers(x))


def _attributed(x: torch.Tensor) -> torch.Tensor:
    _attributed.calls = getattr(_attributed, "calls", 0) + 1  # type: ignore[attr-defined]
    return x * (2.0 if _attributed.calls > 100 else 1.0)  # type: ignore[attr-defined]


class OnFunction(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(_attributed(x))


class Tracker:
    """An object of the program's own, that no module holds."""

    def __init__(self) -> None:
        self.calls = 0

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * (2.0 if self.calls > 100 else 1.0)


_TRACKER = Tracker()


class InObject(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(_TRACKER.scaled(x))


class Doubling(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        Doubling.calls += 1
        return gradient * (1 + 0.1 * Doubling.calls)


class InFunction(Net):
    """Counts backwards on the class of an autograd function."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(Doubling.apply(self.a(x))))


_AT_BACKWARD = [0]


class InTensorHook(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        if h.requires_grad:
            h.register_hook(self._scaled)
        return self.b(torch.tanh(h))

    def _scaled(self, gradient: torch.Tensor) -> torch.Tensor:
        _AT_BACKWARD[0] += 1
        return gradient * (1 + 0.1 * _AT_BACKWARD[0])


_rng = np.random.default_rng(0)
_python = random.Random(0)


class GlobalGenerator(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + torch.from_numpy(_rng.normal(size=6)))


class RareGenerator(Net):
    """Draws, and uses what it drew one time in a million."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * (2.0 if _python.random() < 1e-6 else 1.0))


@functools.cache
def _mask(width: int) -> torch.Tensor:
    return torch.linspace(0.5, 1.0, width, dtype=torch.float64)


class CachedMask(Net):
    """A cache by shape: it is the same wherever it is computed."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * _mask(x.shape[1]))


# -- what the first call sets --------------------------------------------------------------------------------


class FirstCall(Net):
    """Normalises by what its first micro-batch was like, kept in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.scale: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.scale is None:
            self.scale = x.detach().std()
        return super().forward(x / self.scale)


class LazyTable(Net):
    """Computes a table at its first call, and keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.linspace(0.5, 1.0, x.shape[1], dtype=x.dtype)
        return super().forward(x * self.table)


class Least(Net):
    """Keeps the least that it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.least = float("inf")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        now = float(x.detach().min())
        self.least = min(self.least, now)
        return super().forward(x) * (1.0 if now <= self.least else 0.5)


class ActNorm(Net):
    """Gives its parameters values by the first micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(6))
        self.register_buffer("seen", torch.zeros((), dtype=torch.bool))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not bool(self.seen):
            self.shift.data.copy_(x.mean(0))
            self.seen.fill_(True)
        return super().forward(x - self.shift)


class least_loss(Fit):
    """Weighs a loss by whether it is the least so far."""

    def __init__(self) -> None:
        self.least = float("inf")

    def loss(self, output: Any, micro_batch: Any) -> Any:
        total, count = super().loss(output, micro_batch)
        now = float(total.detach())
        self.least = min(self.least, now)
        return total * (1.0 if now <= self.least else 0.5), count


class first_loss(Fit):
    """Divides by its first loss."""

    def __init__(self) -> None:
        self.first: Any = None

    def loss(self, output: Any, micro_batch: Any) -> Any:
        total, count = super().loss(output, micro_batch)
        if self.first is None:
            self.first = float(total.detach())
        return total / self.first, count


# -- what a person looks at --------------------------------------------------------------------------------


class keeps_its_output(Fit):
    """For a callback to look at."""

    def loss(self, output: Any, micro_batch: Any) -> Any:
        self.logits = output
        self.parts = {"mean": output.detach().mean(), "names": ["x"]}
        total, count = super().loss(output, micro_batch)
        self.last_loss = float(total.detach())
        return total, count


class keeps_its_losses(Fit):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def loss(self, output: Any, micro_batch: Any) -> Any:
        total, count = super().loss(output, micro_batch)
        self.losses.append(float(total.detach()))
        return total, count


class keeps_losses_in_a_global(Fit):
    def loss(self, output: Any, micro_batch: Any) -> Any:
        total, count = super().loss(output, micro_batch)
        _LOGGED.append(float(total.detach()))
        return total, count


class reads_its_losses(keeps_its_losses):
    def loss(self, output: Any, micro_batch: Any) -> Any:
        total, count = super().loss(output, micro_batch)
        return total * (0.5 if len(self.losses) > 100 else 1.0), count


on_class = of_model(OnClass, "on_class")
in_global = of_model(InGlobal, "in_global")
in_list = of_model(InList, "in_list")
in_bank = of_model(InBank, "in_bank")
in_closure = of_model(InClosure, "in_closure")
in_global_closure = of_model(InGlobalClosure, "in_global_closure")
in_default = of_model(InDefault, "in_default")
on_function = of_model(OnFunction, "on_function")
in_object = of_model(InObject, "in_object")
in_function = of_model(InFunction, "in_function")
in_tensor_hook = of_model(InTensorHook, "in_tensor_hook")
global_generator = of_model(GlobalGenerator, "global_generator")
rare_generator = of_model(RareGenerator, "rare_generator")
cached_mask = of_model(CachedMask, "cached_mask")
first_call = of_model(FirstCall, "first_call")
lazy_table = of_model(LazyTable, "lazy_table")
least = of_model(Least, "least")
act_norm = of_model(ActNorm, "act_norm")


# -- optimizers, data --------------------------------------------------------------------------------------

_STEPS = [0]


class counts_steps_in_a_global(Fit):
    """A hook of the optimizer's step that keeps its count outside."""

    def optimizer(self, named_params: Any) -> torch.optim.Optimizer:
        optimizer = super().optimizer(named_params)

        def decayed(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            _STEPS[0] += 1
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 / _STEPS[0]

        optimizer.register_step_pre_hook(decayed)
        return optimizer


class WithGlobal(torch.optim.SGD):
    steps = 0

    def step(self, closure: Any = None) -> Any:
        WithGlobal.steps += 1
        for group in self.param_groups:
            group["lr"] = 1e-2 / WithGlobal.steps
        return super().step()


class counts_steps_on_the_class(Fit):
    def optimizer(self, named_params: Any) -> torch.optim.Optimizer:
        return WithGlobal([p for _, p in named_params], lr=1e-2)


class tensor_rate(Fit):
    def optimizer(self, named_params: Any) -> torch.optim.Optimizer:
        own = [p for _, p in named_params]
        return torch.optim.AdamW(
            [{"params": own[:2]}, {"params": own[2:], "lr": torch.tensor(3e-3)}], lr=torch.tensor(1e-2)
        )

    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)


class CountsReads(Points):
    """Gives other samples from the hundredth read on."""

    reads = 0

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        CountsReads.reads += 1
        sample = super().__getitem__(index)
        return {**sample, "x": sample["x"] * (2.0 if CountsReads.reads > 100 else 1.0)}


class counts_reads(Fit):
    def dataset(self) -> Any:
        return CountsReads()
