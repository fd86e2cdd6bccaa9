"""A language model whose projections are fused: query, key and value in one, gate and up in one."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from elastic_train.train.task import Rules
from tests.tasks.chain import VOCABULARY, ChainTask

DIM, HEADS, KV_HEADS, HIDDEN = 16, 4, 2, 24
WIDTH = DIM // HEADS


class Block(nn.Module):
    """Attention with grouped heads and a gated feed-forward layer, with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.qkv = nn.Linear(DIM, (HEADS + 2 * KV_HEADS) * WIDTH)
        self.out = nn.Linear(DIM, DIM)
        self.gate_up = nn.Linear(DIM, 2 * HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, DIM)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        fused = self.qkv(self.norm(x))
        group = fused.shape[-1] // (HEADS + 2 * KV_HEADS)  # elements of each head's width that are here
        sizes = [HEADS * group, KV_HEADS * group, KV_HEADS * group]
        q, k, v = (t.unflatten(-1, (-1, WIDTH)).transpose(1, 2) for t in fused.split(sizes, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).flatten(-2)))
        gate, up = self.gate_up(x).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class FusedModel(nn.Module):
    """Token ids to logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(DIM, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@dataclass
class FusedTask(ChainTask):
    """Next tokens with the fused model."""

    def model(self) -> nn.Module:
        return FusedModel()

    def parallelize(self) -> Rules:
        return Rules(
            tensor_parallel={
                "embed": "row",
                "blocks.*.qkv": "column",
                "blocks.*.out": "row",
                "blocks.*.gate_up": "column",
                "blocks.*.down": "row",
                "head": "column_gathered",
            },
            fused={"blocks.*.qkv": (HEADS, KV_HEADS, KV_HEADS), "blocks.*.gate_up": (1, 1)},
            stages=("blocks.*",),
        )
