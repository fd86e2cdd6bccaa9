"""A small mixture of experts, in the names that DeepSpeed's MoE layers have, and what trains it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.tasks.library_net import LENGTH, VOCABULARY, WIDTH

EXPERTS, INNER = 4, 10
MIXTRAL: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 16, "use_cache": False,
    "num_local_experts": EXPERTS, "num_experts_per_tok": 2, "tie_word_embeddings": False,
}  # fmt: skip
"""The model whose experts AutoEP divides."""


class Expert(nn.Module):
    """What one expert makes of its rows [rows, WIDTH]; `shift` is frozen and `scale` a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.shift = nn.Parameter(torch.zeros(INNER), requires_grad=False)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        inner = F.gelu(self.up(rows.to(self.up.weight.dtype)) + self.shift)
        return (self.down(inner) * self.scale).to(rows.dtype)


class Mixture(nn.Module):
    """Each row goes to the expert that the gate prefers, and is weighed by that preference."""

    def __init__(self) -> None:
        super().__init__()
        self.deepspeed_moe = nn.Module()
        self.deepspeed_moe.gate = nn.Module()
        self.deepspeed_moe.gate.wg = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.deepspeed_moe.experts = nn.Module()
        self.deepspeed_moe.experts.deepspeed_experts = nn.ModuleList([Expert() for _ in range(EXPERTS)])

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        preferred = self.deepspeed_moe.gate.wg(rows).softmax(-1)
        each = torch.stack([e(rows) for e in self.deepspeed_moe.experts.deepspeed_experts], 1)
        chosen = F.one_hot(preferred.argmax(-1), EXPERTS).to(rows.dtype)
        return torch.einsum("re,re,rew->rw", preferred, chosen, each), None, None


class ExpertNet(nn.Module):
    """Logits [batch, VOCABULARY] of tokens [batch, LENGTH]; `mixture` makes an MoE layer."""

    def __init__(self, mixture: Callable[[], nn.Module] = Mixture) -> None:
        super().__init__()
        self.emb, self.pos = nn.Embedding(VOCABULARY, WIDTH), nn.Parameter(torch.zeros(LENGTH, WIDTH))
        self.first, self.second = mixture(), mixture()
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = (self.emb(tokens) + self.pos).flatten(0, 1)
        x = x + self.first(x)[0]
        x = x + self.second(x)[0]
        return self.head(x.unflatten(0, (-1, LENGTH)).mean(1))


def grouped(named: Iterable[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
    """Two groups, each with experts' parameters and others."""
    trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    return [
        {"params": [p for n, p in trained if not n.endswith("bias")], "lr": 2e-2, "weight_decay": 0.1},
        {"params": [p for n, p in trained if n.endswith("bias")], "lr": 1e-2, "weight_decay": 0.0},
    ]
