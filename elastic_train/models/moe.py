"""A feed-forward layer of several experts, of which each token takes a few."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elastic_train.models.initialised_layers import Linear, residual_std
from elastic_train.models.sizes import LlamaConfig


class Experts(nn.Module):
    """SwiGLU layers stacked along dim 0. Their number is read off the weights: they may be some of all."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.stds = config.dim**-0.5, residual_std(config.hidden, config.layers)
        inward = (config.experts, config.hidden, config.dim)
        self.gate = nn.Parameter(torch.empty(inward))
        self.up = nn.Parameter(torch.empty(inward))
        self.down = nn.Parameter(torch.empty(config.experts, config.dim, config.hidden))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.gate, std=self.stds[0])
        nn.init.normal_(self.up, std=self.stds[0])
        nn.init.normal_(self.down, std=self.stds[1])

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """[rows, dim], sorted by expert, and the number of each expert's rows -> [rows, dim]."""
        parts = rows.split(counts.tolist()) if not counts.is_meta else rows.chunk(len(self.gate))
        return torch.cat(
            [
                F.linear(F.silu(F.linear(part, gate)) * F.linear(part, up), down)
                for part, gate, up, down in zip(parts, self.gate, self.up, self.down, strict=False)
            ]
        )


class MixtureOfExperts(nn.Module):
    """Each token goes through the experts with the highest scores, weighted by softmax over those.

    Shazeer et al., Outrageously Large Neural Networks, 2017; dropless as in Gale et al., MegaBlocks, 2023.
    Equal scores go to the lower number, and a token adds its experts in the order of their scores, so what it
    gets depends on nothing but itself.
    """

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.chosen = config.experts_per_token
        self.router = Linear(config.dim, config.experts, std=config.dim**-0.5)
        self.experts = Experts(config)

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] -> [..., dim]."""
        tokens = x.flatten(0, -2)
        scores, experts = self.router(tokens).sort(dim=-1, descending=True, stable=True)
        scores, experts = scores[:, : self.chosen], experts[:, : self.chosen]
        order = experts.flatten().argsort(stable=True)
        rows = tokens.unsqueeze(1).expand(-1, self.chosen, -1).flatten(0, 1)[order]
        numbers = torch.arange(self.router.out_features, device=x.device)
        counts = (experts.flatten() == numbers.unsqueeze(1)).sum(1)
        computed = self.experts(rows, counts)[order.argsort()].unflatten(0, (-1, self.chosen))
        mixed = (computed * scores.softmax(-1).unsqueeze(-1).to(computed.dtype)).sum(1)
        return mixed.view_as(x)
