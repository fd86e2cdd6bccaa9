"""Tasks whose batches and outputs have shapes that people use."""

from __future__ import annotations

import collections
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence

from elastic_train.train.task import Evaluation, Task

WIDTH, TIMES = 4, 3


class Net(nn.Module):
    """A vector to a vector; `wrap` makes the output of it and of the input."""

    def __init__(self, wrap: Callable[..., Any] = lambda x, y: y) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(WIDTH, 8), nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1))
        self.last, self.wrap = nn.Linear(8, 2), wrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(x, self.last(torch.tanh(self.blocks(self.first(x)))))


class Vectors(torch.utils.data.Dataset[Any]):
    """`make` turns a number, an input and a target into a sample."""

    def __init__(self, make: Callable[[int, Tensor, Tensor], Any], length: int = 23) -> None:
        self.make, self.length = make, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if index >= self.length:
            raise IndexError(index)
        generator = torch.Generator().manual_seed(index)
        x, y = (torch.randn(size, generator=generator, dtype=torch.float32) for size in (WIDTH, 2))
        return self.make(index, x, y)


def as_mapping(_index: int, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    return {"x": x, "y": y}


@dataclass
class Program(Task):
    """`inputs_of` and `loss_of` are of a batch, and of an output with its batch."""

    make: Callable[[int, Tensor, Tensor], Any] = as_mapping
    inputs_of: Callable[[Any], Any] = lambda batch: batch["x"]
    loss_of: Callable[[Any, Any], Any] = lambda out, batch: ((out - batch["y"]).square().sum(), len(out))
    wrap: Callable[..., Any] = lambda x, y: y
    combine: Callable[[list[Any]], Any] | None = None
    net: Callable[..., nn.Module] = Net
    samples: int = 23

    def __reduce__(self) -> Any:  # functions without a name go to other processes by that of the program
        name = next((name for name, program in PROGRAMS.items() if program is self), None)
        return super().__reduce__() if name is None else (named, (name,))

    def model(self) -> nn.Module:
        return self.net(self.wrap)

    def optimizer(self, named_params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for _, p in named_params], lr=1e-2)

    def dataset(self) -> Vectors:
        return Vectors(self.make, self.samples)

    def collate(self, samples: list[Any]) -> Any:
        return self.combine(samples) if self.combine is not None else super().collate(samples)

    def inputs(self, micro_batch: Any) -> Any:
        return self.inputs_of(micro_batch)

    def loss(self, output: Any, micro_batch: Any) -> tuple[Tensor, Any]:
        return self.loss_of(output, micro_batch)

    def evaluation(self) -> Evaluation:
        return Evaluation(dataset=Vectors(self.make, 7), every=5)


@dataclass
class Output:
    pred: Tensor
    size: int


@dataclass(frozen=True)
class Sample:
    x: Tensor
    y: Tensor
    name: str
    nothing: None = None


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


class Graphs:
    """A custom batch that moves itself, as those of graph libraries do."""

    def __init__(self, x: Tensor, y: Tensor, sizes: list[int]) -> None:
        self.x, self.y, self.sizes, self.moved = x, y, sizes, False

    def to(self, device: Any) -> Graphs:
        found = Graphs(self.x.to(device), self.y.to(device), self.sizes)
        found.moved = True
        return found


def graphs(samples: list[Any]) -> Graphs:
    """Samples have 1 to 3 nodes each."""
    nodes = [s["x"].repeat(1 + s["i"] % 3, 1) for s in samples]
    return Graphs(torch.cat(nodes), torch.stack([s["y"] for s in samples]), [len(n) for n in nodes])


def graph_loss(out: Tensor, batch: Graphs) -> tuple[Tensor, int]:
    assert batch.moved
    means = torch.stack([part.mean(0) for part in out.split(batch.sizes)])
    return (means - batch.y).square().sum(), len(batch.sizes)


class Recurrent(nn.Module):
    def __init__(self, _wrap: Any) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(WIDTH, 6), nn.Linear(6, 2)

    def forward(self, x: PackedSequence) -> Tensor:
        out, lengths = pad_packed_sequence(self.lstm(x)[0])
        return self.head(out[lengths - 1, torch.arange(out.shape[1])])


def packed(samples: list[Any]) -> Any:
    ragged = [s["x"].repeat(1 + s["i"] % 4, 1) for s in samples]
    return {"x": pack_sequence(ragged, enforce_sorted=False), "y": torch.stack([s["y"] for s in samples])}


def with_index(index: int, x: Tensor, y: Tensor) -> dict[str, Any]:
    return {"i": index, "x": x, "y": y}


def with_strings(index: int, x: Tensor, y: Tensor) -> dict[str, Any]:
    return {"x": x.numpy().astype(np.float64), "y": y, "name": str(index), "none": None}


def noisy(samples: list[Any]) -> dict[str, Tensor]:
    """As collators that mask tokens do: it draws from three generators."""
    x = torch.stack([s["x"] for s in samples])
    return {
        "x": x * (torch.rand_like(x) > 0.3) + np.random.rand(),
        "y": torch.stack([s["y"] for s in samples]),
    }


class InForward(Net):
    """Computes its loss itself, as models of transformers do with labels."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        found = super().forward(x)
        return {"loss": (found - y).square().mean(), "logits": found}


class Flattened(nn.Module):
    """[batch, time, width] to [batch * time, 2], and time-major states of the same length."""

    def __init__(self, _wrap: Any) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.first(x))
        return self.last(hidden).flatten(0, 1), hidden.transpose(0, 1)


def repeated(_index: int, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    return {"x": torch.stack([x * (t + 1) for t in range(TIMES)]), "y": y}


def flattened_loss(out: Any, batch: Any) -> tuple[Tensor, int]:
    logits, states = out
    wanted = batch["y"].repeat_interleave(TIMES, 0)
    return (logits - wanted).square().sum() + states[0].square().sum(), len(batch["y"])


class Normed(nn.Module):
    def __init__(self, _wrap: Any) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(WIDTH, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)))


class Words(collections.UserDict[str, Any]):
    """A batch as tokenizers give it."""

    def to(self, device: Any) -> Words:
        self.data = {name: value.to(device) for name, value in self.data.items()}
        return self


class Frozen(collections.abc.Mapping[str, Any]):
    def __init__(self, data: Any) -> None:
        self._data = dict(data)

    def __getitem__(self, key: str) -> Any:
        return self._data[key]

    def __iter__(self) -> Any:
        return iter(self._data)

    def __len__(self) -> int:
        return len(self._data)


def _of_pred(out: Output, batch: Any) -> tuple[Tensor, int]:
    assert out.size == len(out.pred) == len(batch["y"])
    return (out.pred - batch["y"]).square().sum(), out.size


PROGRAMS: dict[str, Program] = {
    "dataclass output": Program(wrap=lambda x, y: Output(y, len(x)), loss_of=_of_pred),
    "dataclass sample": Program(
        make=lambda i, x, y: Sample(x, y, str(i)),
        inputs_of=lambda b: b.x,
        loss_of=lambda out, b: ((out - b.y).square().sum() * (b.nothing is None), len(b.name)),
    ),
    "UserDict": Program(make=lambda i, x, y: Words(x=x, y=y)),
    "UserDict of its own collate": Program(
        combine=lambda samples: Words({n: torch.stack([s[n] for s in samples]) for n in ("x", "y")})
    ),
    "Mapping": Program(make=lambda i, x, y: Frozen({"x": x, "y": y})),
    "named tuple": Program(
        make=lambda i, x, y: Pair(x, y),
        inputs_of=lambda b: b.x,
        loss_of=lambda out, b: ((out - b.y).square().sum(), len(out)),
    ),
    "strings, None and arrays": Program(
        make=with_strings,
        loss_of=lambda out, b: ((out - b["y"]).square().sum(), len(b["name"])),
    ),
    "graphs": Program(make=with_index, combine=graphs, inputs_of=lambda b: b.x, loss_of=graph_loss),
    "ragged sequences": Program(make=with_index, combine=packed, net=Recurrent),
    "a collator that draws": Program(combine=noisy),
    "loss in forward": Program(
        net=InForward,
        inputs_of=lambda b: b,
        loss_of=lambda out, b: (out["loss"] * len(b["y"]), len(b["y"])),
    ),
    "flattened and time-major": Program(net=Flattened, make=repeated, loss_of=flattened_loss),
    "batch norm": Program(net=Normed),
}


def named(name: str) -> Program:
    return PROGRAMS[name]


ALONE = Program(net=Normed, samples=22)
"""The last micro-batch of an epoch has one sample, which a batch norm cannot train on."""
