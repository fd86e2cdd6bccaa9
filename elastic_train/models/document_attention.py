"""Attention that stays within documents, where several are packed into one sequence."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Within:
    """Where documents are. `positions` [batch, sequence] begin anew in each; `mask` [batch, 1, sequence,
    sequence] says which earlier tokens a token sees, itself included."""

    positions: Tensor
    mask: Tensor

    @classmethod
    def of(cls, documents: Tensor) -> Within:
        """From the number of each token's document, int64 [batch, sequence]; its tokens are neighbours."""
        places = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
        changes = torch.ones_like(documents, dtype=torch.bool)
        changes[:, 1:] = documents[:, 1:] != documents[:, :-1]
        starts = torch.where(changes, places, 0).cummax(dim=1).values
        same = documents[:, :, None] == documents[:, None, :]
        earlier = places[:, None, :] <= places[:, :, None]
        return cls(positions=places - starts, mask=(same & earlier)[:, None])
