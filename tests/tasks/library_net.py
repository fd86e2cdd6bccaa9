"""A small network and its samples, for training that begins in another library and goes on here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY, WIDTH, HIDDEN, LENGTH = 13, 8, 12, 5
BATCH, SAVED, LAST = 8, 4, 9
"""Samples of a step; the step whose checkpoint is kept; the last step of the library's own resume."""
DECAYED = ("emb.weight", "inner.weight", "head.weight")


class Net(nn.Module):
    """Logits [batch, VOCABULARY] of tokens [batch, LENGTH]; `shift` is a buffer that isn't initialized so."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.inner = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, HIDDEN)
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY)
        self.register_buffer("shift", torch.zeros(HIDDEN))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(F.gelu(self.inner(self.emb(tokens).mean(1)) + self.shift)))


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sample n follows from n; in order, BATCH of them are a step."""

    def __len__(self) -> int:
        return BATCH * (LAST + 1)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        drawn = torch.Generator().manual_seed(500 + index)
        tokens = torch.randint(VOCABULARY, (LENGTH + 1,), generator=drawn)
        return {"tokens": tokens[:-1], "target": tokens[-1]}


def batch_of(step: int) -> dict[str, torch.Tensor]:
    """The samples of the step after `step` steps."""
    rows = [Samples()[step * BATCH + at] for at in range(BATCH)]
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def new_net() -> Net:
    """The network as every library begins with it."""
    torch.manual_seed(0)
    net = Net()
    with torch.no_grad():
        net.shift.copy_(torch.linspace(-1, 1, HIDDEN))
    return net


def grouped(named: Iterable[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
    """Two groups; by name, since wrappers make parameters flat."""
    parts: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
    for name, parameter in named:
        parts[name.endswith(DECAYED)].append(parameter)
    return [
        {"params": parts[True], "lr": 2e-2, "weight_decay": 0.1},
        {"params": parts[False], "lr": 1e-2, "weight_decay": 0.0},
    ]


def loss_of(logits: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(logits, batch["target"])


LLAMA: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": HIDDEN, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 16, "use_cache": False,
}  # fmt: skip
"""The model of Hugging Face's Trainer."""


class TokenRows(Samples):
    """The same tokens, as transformers' models want them."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = super().__getitem__(index)["tokens"]
        return {"input_ids": tokens, "labels": tokens}
