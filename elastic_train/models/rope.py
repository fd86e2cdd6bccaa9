"""Rotary position embedding."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Rope(nn.Module):
    """Rotates pairs of channels by an angle that grows with the position.

    Su et al., RoFormer, 2021, section 3.2.2; channel i is paired with i + head_dim / 2. The frequencies are a
    buffer outside the state dict: they follow from the configuration, and `reset_parameters` computes them.
    """

    frequencies: Tensor  # [head_dim / 2], radians per position

    def __init__(self, head_dim: int, *, theta: float):
        super().__init__()
        self.head_dim, self.theta = head_dim, theta
        self.register_buffer("frequencies", torch.empty(head_dim // 2), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        exponent = torch.arange(0, self.head_dim, 2, dtype=torch.float64) / self.head_dim
        with torch.no_grad():
            self.frequencies.copy_(self.theta**-exponent)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Rotate [batch, sequence, heads, head_dim]; angles are never computed in less than float32.

        `positions` [batch, sequence] are those of the tokens, where they don't count from 0.
        """
        precise = torch.promote_types(x.dtype, torch.float32)
        if positions is None:
            positions = torch.arange(x.shape[1], device=x.device)
        angles = (positions.to(precise)[..., None] * self.frequencies.to(precise))[..., None, :]
        cos, sin = angles.cos(), angles.sin()
        first, second = x.to(precise).chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
