"""The gated feed-forward layer."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from elastic_train.models.initialised_layers import Linear, residual_std
from elastic_train.models.sizes import LlamaConfig


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)): Shazeer, GLU Variants Improve Transformer, 2020."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.gate = Linear(config.dim, config.hidden, std=config.dim**-0.5)
        self.up = Linear(config.dim, config.hidden, std=config.dim**-0.5)
        self.down = Linear(config.hidden, config.dim, std=residual_std(config.hidden, config.layers))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))
