"""A training problem small enough for every plan, with what makes plans differ if anything does.

Tied weights, a frozen layer, a parameter without dims, dropout, a buffer that is computed, sizes that divide
by nothing, two parameter groups and an empty one, and samples of different weight.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from elastic_train.config import Batch, RunSpec
from elastic_train.train.task import Task

VOCABULARY, WIDTH, HIDDEN, LENGTH = 11, 6, 7, 5


class Block(nn.Module):
    """A residual MLP with dropout."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Positions(nn.Module):
    """Sines of the position; computed, never stored by a state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.empty(LENGTH, WIDTH), persistent=False)

    def reset_parameters(self) -> None:
        at = torch.arange(LENGTH, dtype=self.table.dtype)[:, None]
        self.table = torch.sin(at * torch.arange(1, WIDTH + 1, dtype=self.table.dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table


class Gate(nn.Module):
    """Scales by one number."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.empty(()))

    def reset_parameters(self) -> None:
        nn.init.constant_(self.value, 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.value


class TinyModel(nn.Module):
    """Next-token logits, [batch, LENGTH, VOCABULARY]."""

    def __init__(self, dropout: float, norm: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = Positions()
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.gate = Gate()
        self.batch_norm = nn.BatchNorm1d(WIDTH) if norm else None
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.positions(self.embed(tokens))
        for block in self.blocks:
            x = block(x)
        x = x + self.gate(self.frozen(x))
        if self.batch_norm is not None:
            x = self.batch_norm(x.flatten(0, 1)).view_as(x)
        return self.head(x)


class TinyData(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences by number; each has its own number of tokens that count."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(VOCABULARY, (LENGTH + 1,), generator=generator)
        counted = torch.arange(LENGTH) < 1 + index % LENGTH
        return {"tokens": tokens[:-1], "targets": tokens[1:], "counted": counted}


@dataclass
class TinyTask(Task):
    """`optimizer_name` and `settings` choose a torch optimizer; the rest switches what a test wants."""

    optimizer_name: str = "AdamW"
    settings: dict[str, Any] = field(default_factory=lambda: {"lr": 3e-2})
    samples: int = 57
    dropout: float = 0.2
    batch_norm: bool = False
    groups: bool = True

    def model(self) -> nn.Module:
        return TinyModel(self.dropout, self.batch_norm)

    def optimizer(self, named_params: Any) -> torch.optim.Optimizer:
        named = dict(named_params)
        made = getattr(torch.optim, self.optimizer_name)
        if not self.groups:
            return made(named.values(), **self.settings)
        matrices = [p for p in named.values() if p.ndim > 1]
        others = [p for p in named.values() if p.ndim < 2]
        return made(
            [
                {"params": matrices},
                {"params": [], "lr": 0.5},
                {"params": others, "lr": self.settings["lr"] / 3, "weight_decay": 0.0},
            ],
            **self.settings,
        )

    def schedule(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.2, total_iters=10)

    def dataset(self) -> TinyData:
        return TinyData(self.samples)

    def loss(self, output: torch.Tensor, micro_batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, Any]:
        each = F.cross_entropy(output.flatten(0, 1), micro_batch["targets"].flatten(), reduction="none")
        counted = micro_batch["counted"].flatten()
        return (each * counted).sum(), counted.sum()


def tiny_run(global_size: int = 13, **changes: Any) -> RunSpec:
    """Five steps of it on up to four workers; of 13 samples the last micro-batch has one."""
    given = {
        "name": "tiny",
        "storage_path": "/nowhere",
        "batch": Batch(global_size=global_size, micro_size=3, seed=5),
        "max_steps": 5,
        "min_workers": 1,
        "max_workers": 4,
        "precision": "fp64",
    }
    return RunSpec(**{**given, **changes})
