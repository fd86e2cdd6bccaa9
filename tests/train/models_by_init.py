"""Models that set their initial values in the ways that people do."""

from __future__ import annotations

import os
import random

import numpy as np
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 7), nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).tanh())


class SetInConstructor(Net):
    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.last.weight)
        nn.init.constant_(self.last.bias, -4.6)


class Applied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.apply(self._init)
        for name, parameter in self.named_parameters():
            if name.endswith("first.weight"):
                nn.init.normal_(parameter, std=0.02 / 2**0.5)

    def _init(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)


class Loaded(Net):
    def __init__(self) -> None:
        super().__init__()
        self.load_state_dict(
            {name: torch.full(tuple(v.shape), 0.25) for name, v in self.state_dict().items()}
        )


class ParentsFirst(Net):
    """The parent writes before the child is there, and the child draws last."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            self.first.weight.mul_(3.0)
        self.head = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(super().forward(x))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attend(x[:, None], x[:, None], x[:, None], need_weights=False)[0]


class Masks(nn.Linear):
    """Buffers of dtypes that have no mark for what is not written, and others."""

    def __init__(self) -> None:
        super().__init__(6, 3)
        self.register_buffer("keep", torch.arange(6) < 4)
        self.register_buffer("bytes", (torch.arange(6) % 2).to(torch.uint8))
        self.register_buffer("order", torch.randperm(6), persistent=False)
        self.register_buffer("scale", torch.rand(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x[:, self.order] * self.keep * self.bytes * self.scale)


class OnTheHost(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(6, 6)
        with torch.device("cpu"):
            self.net = Net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(self.before(x))


class FromNumpy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.from_numpy(np.random.randn(6, 3).astype(np.float32)))
        self.bias = nn.Parameter(torch.tensor([random.random() for _ in range(3)]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.bias


class Items(Net):
    """Needs values while it is built, and draws from the host's generator what only its forward sees."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]
        self.factor = torch.rand(1).item()
        self.shift = torch.rand(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward((x + self.shift.to(x.dtype)) * self.factor + sum(self.rates))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        nn.init.eye_(self.head.weight)
        self.head.weight = self.embed.weight
        nn.init.orthogonal_(self.embed.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.frozen(self.embed(x)))


class Normed(Net):
    def __init__(self) -> None:
        super().__init__()
        torch.nn.utils.parametrizations.weight_norm(self.first)
        self.norm = nn.BatchNorm1d(3)
        nn.init.zeros_(self.norm.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(super().forward(x))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(1, 5, 2, batch_first=True)
        for name, parameter in self.cells.named_parameters():
            if "bias" in name:
                nn.init.ones_(parameter)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cells(x[:, :, None])[0]


class LeftEmpty(nn.Module):
    """A constructor that leaves a tensor to `reset_parameters`, which nobody called."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.empty(6))

    def reset_parameters(self) -> None:
        nn.init.constant_(self.scale, 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.scale


class Unseeded(Net):
    def __init__(self) -> None:
        super().__init__()
        nn.init.constant_(self.last.bias, int.from_bytes(os.urandom(3)))


class Changing(Net):
    """Has other sizes each time it is built."""

    number = 0

    def __init__(self) -> None:
        super().__init__()
        Changing.number += 1
        self.more = nn.Linear(3, Changing.number)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.more(super().forward(x))


PLAIN = [SetInConstructor, Applied, Loaded, ParentsFirst, Attention, Masks, OnTheHost, FromNumpy, Items]
PLAIN += [Tied, Normed, Recurrent]
