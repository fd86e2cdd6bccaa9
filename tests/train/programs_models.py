"""Programs that are about what a model is, and what its forward leaves behind."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from elastic_train.train.task import Evaluation
from tests.train.programs import Fit, Net, Points, of_model

# -- initial values ----------------------------------------------------------------------------------------


class InConstructor(Net):
    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.b.weight)
        nn.init.constant_(self.b.bias, 5.0)


class Applied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.apply(self._init)

    def _init(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend, self.out = nn.MultiheadAttention(6, 2, batch_first=True), nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x[:, None]
        return self.out(self.attend(x, x, x, need_weights=False)[0][:, 0])


class Drawn(Net):
    """From numpy, Python, the host's generator, and values that are read while it is built."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.from_numpy(np.random.randn(6)))
        self.register_buffer("keep", torch.randperm(6) < 4)
        self.rates = [rate.item() for rate in torch.linspace(0, random.random(), 3)]
        self.scale = torch.rand(6)
        with torch.device("cpu"):
            self.more = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.more(x) * self.weight * self.keep * self.scale) + sum(self.rates)


class Listed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
        self.weights = [self.weight]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.weights[0])


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.LazyLinear(3), nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x))


# -- changed in forward ------------------------------------------------------------------------------------


class MaxNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(20, 4, max_norm=0.5), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.embed((x[:, 0].abs() * 10).long().clamp(max=19)))


class Clamped(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.a.weight.clamp_(-0.05, 0.05)
        return super().forward(x)


class ClampedWhenEvaluated(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            with torch.no_grad():
                self.a.weight.clamp_(-0.05, 0.05)
        return super().forward(x)


class Normalised(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.b.weight.data = F.normalize(self.b.weight.data)
        return super().forward(x)


class Assigned(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return super().forward(x - self.mean)


class InPlace(Assigned):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return Net.forward(self, x - self.mean)


class Spectral(Net):
    def __init__(self) -> None:
        super().__init__()
        torch.nn.utils.parametrizations.spectral_norm(self.a)


class Counter(Net):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) * (1 + 0.01 * self.calls)


class OnlyCounts(Counter):
    """The counter matters from the hundredth call on."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return Net.forward(self, x) * (2.0 if self.calls > 100 else 1.0)


class Moving(Net):
    """A moving mean in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = [*self.seen[-3:], x.detach().mean()]
        return super().forward(x - torch.stack(self.seen).mean())


class OwnGenerator(Net):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(x.shape, generator=self.generator, dtype=x.dtype, device="cpu")
        return super().forward(x + 0.1 * noise)


_generator = np.random.default_rng(0)


class HiddenGenerator(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + 0.1 * torch.from_numpy(_generator.standard_normal(x.shape)))


class Extra(Net):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0

    def get_extra_state(self) -> Any:
        return {"scale": self.scale}

    def set_extra_state(self, state: Any) -> None:
        self.scale = state["scale"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scale *= 0.99
        return super().forward(x) * self.scale


class Cached(Net):
    """Keeps what it computed, for its loss or for a person: nothing that the next call reads."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Any = None
        self.mask: Any = None
        self.info: dict[str, Any] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mask is None:
            self.mask = torch.ones(6, dtype=x.dtype)
        self.last = x.square().mean() + self.a.weight.square().sum()
        self.info = {"shape": tuple(x.shape), "mean": float(x.mean())}
        return super().forward(x * self.mask)


class WritesInputs(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.mul_(2.0))


class Standard(Net):
    """Random numbers of the generators that are seeded."""

    def __init__(self) -> None:
        super().__init__(dropout=0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * (1 + 0.1 * np.random.rand() + 0.1 * random.random()) + torch.rand_like(x))


# -- kinds of modules --------------------------------------------------------------------------------------


class Frozen(nn.Module):
    """A part in evaluation mode, as its constructor left it."""

    def __init__(self) -> None:
        super().__init__()
        self.back = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5))
        self.back.requires_grad_(False).eval()
        self.out = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.back(x))


class Hooked(Net):
    def __init__(self) -> None:
        super().__init__()
        self.a.weight.register_hook(lambda gradient: gradient * 0.5)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        self.b.weight, self.c, self.out = self.a.weight, self.a, nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.c(self.b(self.a(x).tanh()).tanh()))


class WeightNorm(Net):
    def __init__(self) -> None:
        super().__init__()
        torch.nn.utils.parametrizations.weight_norm(self.a)


class ChildWeights(nn.Module):
    """Uses the weights of the members of a list without calling them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.out = nn.ModuleList(nn.Linear(6, 6) for _ in range(2)), nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layers: Any = self.layers
        for layer in layers:
            x = torch.tanh(F.linear(x, layer.weight, layer.bias))
        return self.out(x)


class Branches(Net):
    """A branch that some micro-batches take."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + (self.other(x) if x[0, 0] > 0.3 else 0)


class BatchNormed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.norm(x))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.out = nn.LSTM(1, 5, 2, batch_first=True, dropout=0.2), nn.Linear(5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.cells(x[:, :, None])[0][:, -1])


class Complex(nn.Module):
    DTYPE = torch.complex128

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4, dtype=self.DTYPE))
        self.out = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out((x.to(self.weight.dtype) @ self.weight).abs().to(x.dtype))


class ComplexOfHalves(Complex):
    DTYPE = torch.complex64


def _evaluated(model: Any, name: str) -> type[Fit]:
    """A task of this model that is evaluated every second step, which the plain loop is not."""

    class Given(of_model(model, name)):  # type: ignore[misc]
        def evaluation(self) -> Evaluation:
            return Evaluation(dataset=Points(), every=2)

    Given.__name__ = Given.__qualname__ = name
    return Given


set_in_constructor = of_model(InConstructor, "set_in_constructor")
applied = of_model(Applied, "applied")
attention = of_model(Attention, "attention")
drawn = of_model(Drawn, "drawn")
listed_parameter = of_model(Listed, "listed_parameter")
lazy = of_model(Lazy, "lazy")
max_norm = of_model(MaxNorm, "max_norm")
clamped_in_forward = of_model(Clamped, "clamped_in_forward")
clamped_when_evaluated = _evaluated(ClampedWhenEvaluated, "clamped_when_evaluated")
max_norm_evaluated = _evaluated(MaxNorm, "max_norm_evaluated")
normalised_data = of_model(Normalised, "normalised_data")
assigned_buffer = of_model(Assigned, "assigned_buffer")
buffer_in_place = of_model(InPlace, "buffer_in_place")
spectral_norm = of_model(Spectral, "spectral_norm")
counter = of_model(Counter, "counter")
only_counts = of_model(OnlyCounts, "only_counts")
moving_attribute = of_model(Moving, "moving_attribute")
own_generator = of_model(OwnGenerator, "own_generator")
hidden_generator = of_model(HiddenGenerator, "hidden_generator")
extra_state = of_model(Extra, "extra_state")
cached = of_model(Cached, "cached")
writes_inputs = of_model(WritesInputs, "writes_inputs")
standard_generators = of_model(Standard, "standard_generators")
frozen_part = of_model(Frozen, "frozen_part")
gradient_hook = of_model(Hooked, "gradient_hook")
tied = of_model(Tied, "tied")
weight_norm = of_model(WeightNorm, "weight_norm")
child_weights = of_model(ChildWeights, "child_weights")
branches = of_model(Branches, "branches")
batch_norm = of_model(BatchNormed, "batch_norm")
recurrent = of_model(Recurrent, "recurrent")
complex_parameter = of_model(Complex, "complex_parameter")
complex_of_halves = of_model(ComplexOfHalves, "complex_of_halves")
