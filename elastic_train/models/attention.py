"""Causal self-attention with grouped key and value heads."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from elastic_train.models.document_attention import Within
from elastic_train.models.initialised_layers import Linear, residual_std
from elastic_train.models.rope import Rope
from elastic_train.models.sizes import LlamaConfig


class CausalMix(nn.Module):
    """Where positions meet: each gets a mean of the values of those before it and of its own.

    It is given all positions, and as many heads as are here.
    """

    def __init__(self, head_dim: int, *, theta: float):
        super().__init__()
        self.rope = Rope(head_dim, theta=theta)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, within: Within | None = None) -> Tensor:
        """Of [batch, sequence, heads, head_dim], where queries may have more heads; as the queries."""
        positions, mask = (None, None) if within is None else (within.positions, within.mask)
        q, k, v = (t.transpose(1, 2) for t in (self.rope(query, positions), self.rope(key, positions), value))
        mixed = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1]
        )
        return mixed.transpose(1, 2)


class Attention(nn.Module):
    """Grouped-query attention: `heads / kv_heads` query heads share a key and value head.

    Ainslie et al., GQA, 2023. The number of heads is read off the outputs of the projections, so the module
    computes correctly where those hold only a part of the heads.
    """

    def __init__(self, config: LlamaConfig):
        super().__init__()
        dim, std = config.dim, config.dim**-0.5
        self.head_dim = config.head_dim
        self.wq = Linear(dim, config.heads * self.head_dim, std=std)
        self.wk = Linear(dim, config.kv_heads * self.head_dim, std=std)
        self.wv = Linear(dim, config.kv_heads * self.head_dim, std=std)
        self.wo = Linear(config.heads * self.head_dim, dim, std=residual_std(dim, config.layers))
        self.mix = CausalMix(self.head_dim, theta=config.rope_theta)

    def forward(self, x: Tensor, within: Within | None = None) -> Tensor:
        """[batch, sequence, dim] -> [batch, sequence, dim]."""
        query, key, value = (w(x).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        return self.wo(self.mix(query, key, value, within).flatten(-2))
